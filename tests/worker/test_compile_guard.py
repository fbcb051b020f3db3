"""Compilers that fail: the run goes on without, or ends with the cause."""

import pytest
import torch
from guarded import batches
from made_runs import of
from torch._inductor.exc import CppCompileError

from upsnb import overlays
from upsnb.errors import RunError
from upsnb.runs import runfolder
from upsnb.training import kernels
from upsnb.training.setup import Setup


@pytest.fixture
def broken_compiler(monkeypatch):
    """Inductor raises; what dynamo learned is forgotten before and after."""
    torch._dynamo.reset()

    def refuse(*_, **__):
        raise RuntimeError("no C++ compiler")

    monkeypatch.setattr("torch._inductor.compile_fx.compile_fx", refuse)
    yield
    torch._dynamo.reset()


@pytest.fixture
def eager_compiler(monkeypatch):
    """Graphs are traced and run as they are: all of compiling but the slow part."""
    torch._dynamo.reset()
    monkeypatch.setattr("torch._inductor.compile_fx.compile_fx", lambda graph, inputs, **_: graph.forward)
    yield
    torch._dynamo.reset()


def test_a_failing_compilation_stops_the_run_with_its_cause(tiny_config, train_here, tmp_path, broken_compiler):
    with pytest.raises(RunError, match="compiling failed in step 1: .*no C.. compiler.*guards.compile_failure"):
        train_here(tiny_config(**{"training.compile": True}), tmp_path / "run")


def test_with_the_guard_the_run_goes_on_uncompiled(tiny_config, train_here, tmp_path, broken_compiler):
    config = tiny_config(**{"training.compile": True, "guards.compile_failure": "off"})
    events = train_here(config, tmp_path / "run")
    (act,), (flip,) = of(events, "guard"), of(events, "flip")
    assert act["revision"] == flip["revision"] and flip["changes"] == {"training.compile": False}
    assert "no C++ compiler" in act["reason"] and flip["step"] == 0 and of(events, "end")
    assert [event["step"] for event in of(events, "step")][:3] == [1, 2, 3]


def test_a_compilation_that_fails_in_a_later_step_is_switched_off_and_the_step_taken_again(
    tiny_config, train_here, tmp_path, spoil, eager_compiler
):
    def refuse_eighth(call, total):  # two calls of the probe, then steps; the sixth fails
        if call == 8:
            raise CppCompileError(["g++"], "internal compiler error")
        return total

    spoil(refuse_eighth)
    events = train_here(tiny_config(**{"training.compile": True, "guards.compile_failure": "off"}), tmp_path / "run")
    (act,), steps = of(events, "guard"), of(events, "step")
    assert act["step"] == 5 and of(events, "flip")[0]["changes"] == {"training.compile": False}
    assert [event["step"] for event in steps] == list(range(1, len(steps) + 1)) and of(events, "end")


def test_a_compile_error_of_a_run_that_compiles_nothing_is_raised_as_it_is(tiny_config, train_here, tmp_path, spoil):
    def refuse(call, total):
        raise CppCompileError(["g++"], "FlexAttention compiles itself")

    spoil(refuse)
    with pytest.raises(CppCompileError):
        train_here(tiny_config(**{"guards.compile_failure": "off"}), tmp_path / "run")


def test_a_flip_to_compile_that_cannot_compile_is_rolled_back_and_training_goes_on(
    tiny_config, train_here, tmp_path, broken_compiler
):
    folder = tmp_path / "run"

    def ask(step):
        if step == 3:
            runfolder.write_control(folder, {"training.compile": True})

    events = train_here(tiny_config(), folder, ask)
    (flip,) = of(events, "flip")
    assert not flip["applied"] and "no C++ compiler" in flip["reason"] and flip["phases_on"] == []
    assert of(events, "end")


def test_a_second_wish_to_compile_is_tried_again(tiny_setup, broken_compiler):
    setup = tiny_setup()
    for _ in range(2):
        setup.update(overlays.apply(setup.config, {"training.compile": True}))
        with pytest.raises(Exception, match="compiler"):
            setup.try_compile()
        setup.update(overlays.apply(setup.config, {"training.compile": False}))
    setup.step(batches(setup), 0)


def test_compiling_ahead_leaves_noise_gradients_weights_and_data_as_found(tiny_setup, eager_compiler):
    overlay = {"operator.pdet.drop_path": 0.5, "training.noise": 0.1, "training.compile": True}
    plain, probed = tiny_setup(**overlay), tiny_setup(**overlay)
    losses = []
    for setup in (plain, probed):
        torch.manual_seed(0)
        epoch = setup.loader.epoch(0)
        first = [next(epoch), next(epoch)]
        if setup is probed:
            setup.try_compile()
            assert all(parameter.grad is None for parameter in setup.model.parameters())
        losses.append(setup.step(first, 0)[0].item())
        losses.append(setup.step([next(epoch), next(epoch)], 1)[0].item())
    assert losses[:2] == losses[2:]


def test_a_step_that_fails_by_numbers_without_a_meaning_is_tried_with_real_ones(
    tiny_setup, eager_compiler, monkeypatch
):
    setup, probe, rehearsed = tiny_setup(**{"training.compile": True}), Setup._probe, []

    def stumble(self):
        rehearsed.append(kernels._unfinished is not None)
        if rehearsed[-1]:
            raise IndexError("a row that the table does not have")
        probe(self)

    monkeypatch.setattr(Setup, "_probe", stumble)
    setup.try_compile()
    assert rehearsed == [True, False] and setup.probed == setup.config


def test_what_is_compiled_already_is_not_tried_out_again(tiny_setup, eager_compiler, monkeypatch):
    setup = tiny_setup(**{"training.compile": True})
    setup.try_compile()
    monkeypatch.setattr(Setup, "_probe", lambda _: pytest.fail("tried out again"))
    setup.update(overlays.apply(setup.config, {"optimizer.lr": 1e-4}))
    setup.try_compile()
