"""Guards: what a run does by itself when training goes wrong, by injected failures and by the events it leaves."""

import json
import math
from pathlib import Path

import pytest
import torch
from made_runs import fields
from torch._inductor.exc import CppCompileError

from upsnb import config as configs
from upsnb import overlays
from upsnb.config import GuardsConfig
from upsnb.errors import ConfigError, RunError
from upsnb.runs import handle, postmortem, recovery, runfolder
from upsnb.runs.supervisor import Supervisor
from upsnb.training.losses import UPSObjective
from upsnb.training.parallel import Ranks
from upsnb.training.setup import Setup, load_model
from upsnb.worker import flips, guard_policies, guards
from upsnb.worker.guard_policies import OFFLOAD, MemoryHistory, OffloadTrial


def of(events, kind, **fields):
    return [e for e in events if e["kind"] == kind and all(e[key] == value for key, value in fields.items())]


def batches(setup: Setup, count: int = 2) -> list:
    epoch = setup.loader.epoch(0)
    return [next(epoch) for _ in range(count)]


def state_of(setup: Setup) -> dict[str, torch.Tensor]:
    """Copies of weights, moments and averages."""
    found = {f"weight {name}": p.detach().clone() for name, p in setup.model.named_parameters()}
    for number, optimizer in enumerate(setup.optimizers):
        for index, entry in optimizer.state_dict()["state"].items():
            found |= {f"{number}.{index}.{key}": torch.as_tensor(value).clone() for key, value in entry.items()}
    if setup.ema is not None:
        found |= {f"average {i}": average.clone() for i, average in enumerate(setup.ema.average)}
    return found


WORKER = Path(__file__).parents[1] / "processes" / "guarded_worker.py"


@pytest.fixture
def spoil(monkeypatch):
    """`spoil(what)`: let `what(call number, total loss)` replace or refuse every loss, from 1 on."""

    def install(what):
        calls = []

        def change(batch, total):
            calls.append(len(batch.inputs))
            return what(len(calls), total)

        change_losses(monkeypatch, change)
        return calls

    return install


def change_losses(monkeypatch, change) -> None:
    """Let `change(batch, total loss)` say what every loss is."""
    real = UPSObjective.forward

    def forward(self, batch, weights, amp_dtype):
        total, terms = real(self, batch, weights, amp_dtype)
        return change(batch, total), terms

    monkeypatch.setattr(UPSObjective, "forward", forward)


# -- nonfinite -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("amp", [None, "bfloat16", "float16"])
def test_a_step_without_a_finite_loss_changes_no_weight_moment_or_average(tiny_setup, spoil, bad, amp):
    overlay = {"training.amp": amp is not None, "training.amp_dtype": amp or "float32"}
    setup = tiny_setup(**overlay, **{"guards.nonfinite": "stop", "training.ema_decay": 0.99})
    spoil(lambda call, total: total * bad if call == 3 else total)
    setup.step(batches(setup), 0)
    before = state_of(setup)
    setup.step(batches(setup), 1)
    assert setup.skipped == "loss"
    after = state_of(setup)
    assert before.keys() == after.keys()
    assert all(torch.equal(before[key], after[key]) for key in before)
    setup.step(batches(setup), 2)
    assert not setup.skipped
    assert any(not torch.equal(before[key], value) for key, value in state_of(setup).items())


def test_an_infinite_gradient_under_a_finite_loss_is_skipped_too(tiny_setup):
    setup = tiny_setup(**{"guards.nonfinite": "stop"})
    parameter = next(setup.model.parameters())
    hook = parameter.register_hook(lambda gradient: gradient * math.inf)
    before = state_of(setup)
    loss, _, _ = setup.step(batches(setup), 0)
    hook.remove()
    assert loss.isfinite() and setup.skipped == "gradient"
    assert all(torch.equal(before[key], value) for key, value in state_of(setup).items())


def test_overflows_that_the_scaler_searches_its_scale_with_are_no_failure(tiny_setup):
    setup = tiny_setup(
        **{"guards.nonfinite": "stop", "training.amp": True, "training.amp_dtype": "float16"},
    )
    setup.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127)
    reasons = []
    for step in range(4):
        setup.step(batches(setup), step)
        reasons.append(setup.skipped)
    assert set(reasons) == {"overflow"}
    assert setup.scaler.get_scale() == 2.0**123


def test_a_collapsed_scale_counts_as_failure(tiny_setup):
    setup = tiny_setup(**{"guards.nonfinite": "stop", "training.amp": True, "training.amp_dtype": "float16"})
    setup.scaler = torch.amp.GradScaler("cpu", init_scale=0.5)
    next(setup.model.parameters()).register_hook(lambda gradient: gradient * math.inf)
    setup.step(batches(setup), 0)
    assert setup.skipped == "gradient"


def test_float16_switches_to_bfloat16_after_patience_and_the_flip_carries_the_guards_revision(
    tiny_config, train_here, tmp_path, spoil
):
    overlay = {"guards.nonfinite": "bfloat16", "training.amp": True, "training.amp_dtype": "float16"}
    spoil(lambda call, total: total * math.nan if 4 <= call <= 6 else total)
    events = train_here(tiny_config(**overlay), tmp_path / "run")
    skips = of(events, "guard", action="skip")
    assert [skip["step"] for skip in skips] == [4, 5, 6] and [skip["in_a_row"] for skip in skips] == [1, 2, 3]
    (act,) = of(events, "guard", action="bfloat16")
    (flip,) = of(events, "flip")
    assert flip["revision"] == act["revision"] and flip["applied"] and flip["step"] == 6
    assert flip["changes"] == {"training.amp_dtype": "bfloat16"}
    assert of(events, "end") and all(math.isfinite(e["loss"]) for e in of(events, "step")[6:])


def test_a_lone_bad_step_ends_nothing(tiny_config, train_here, tmp_path, spoil):
    spoil(lambda call, total: total * math.nan if call % 3 else total)  # two in a row, patience is three
    events = train_here(tiny_config(**{"guards.nonfinite": "stop"}), tmp_path / "run")
    assert of(events, "end") and len(of(events, "guard", action="skip")) > 4 and not of(events, "guard", action="stop")


@pytest.mark.parametrize(
    ("overlay", "said"),
    [({"guards.nonfinite": "stop"}, "since step 3"), ({"guards.nonfinite": "bfloat16"}, "computes in float32 already")],
)
def test_stopping_names_step_term_and_advice_and_keeps_the_last_good_checkpoint(
    tiny_config, train_here, tmp_path, monkeypatch, overlay, said
):
    real = UPSObjective.forward

    def forward(self, batch, weights, amp_dtype):
        total, terms = real(self, batch, weights, amp_dtype)
        forward.calls += 1
        factor = math.nan if forward.calls >= 3 else 1.0
        return total * factor, {term: value * factor for term, value in terms.items()}

    forward.calls = 0
    monkeypatch.setattr(UPSObjective, "forward", forward)
    with pytest.raises(RunError, match="step 5: .*relative") as caught:
        train_here(tiny_config(**overlay, **{"checkpoint.interval": 2}), tmp_path / "run")
    assert said in str(caught.value) and "optimizer.lr" in str(caught.value)
    events = runfolder.read_events(tmp_path / "run")
    assert of(events, "guard", action="stop")[0]["step"] == 5
    assert all(p.isfinite().all() for p in load_model(tmp_path / "run").parameters())


def test_without_the_guard_a_step_does_not_wait_for_its_loss(tiny_setup, monkeypatch):
    setup = tiny_setup()
    monkeypatch.setattr(Setup, "_reason_to_skip", lambda *_: pytest.fail("read the loss inside the step"))
    setup.step(batches(setup), 0)
    assert setup.skipped == ""


# -- memory --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch_size", [1, 2, 7, 24, 30])
def test_every_smaller_microbatch_keeps_the_effective_batch(batch_size):
    chain = recovery.sizes(batch_size, 2)
    assert {batch * accum for batch, accum in chain} == {2 * batch_size}
    assert chain[-1][0] == 1 and [b for b, _ in chain] == sorted({b for b, _ in chain}, reverse=True)


def test_sizes_fall_by_the_largest_divisor():
    assert recovery.sizes(30, 2) == [(30, 2), (15, 4), (5, 12), (1, 60)]


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (torch.OutOfMemoryError("CUDA out of memory"), True),
        (MemoryError(), True),
        (RuntimeError("[enforce fail] data. DefaultCPUAllocator: can't allocate memory: you tried 9 bytes"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True),
        (RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"), True),
        (
            RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be reported later"),
            True,
        ),  # AcceleratorError
        (RuntimeError("NCCL error: unhandled cuda error. Last error:\nCuda failure 2 'out of memory'"), True),
        (RuntimeError("shapes do not match"), False),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), False),
    ],
)
def test_errors_that_mean_missing_memory_are_known(error, expected):
    assert recovery.is_out_of_memory(error) == expected
    wrapped = RuntimeError("in backward")
    wrapped.__cause__ = error
    assert recovery.is_out_of_memory(wrapped) == expected


@pytest.fixture
def little_memory(monkeypatch):
    """`little_memory(4)`: microbatches of more than 4 pairs run out of memory, in the backward pass; seen pairs."""

    def install(most):
        seen = []

        def fill(batch, total):
            if len(batch.inputs) > most:
                total.register_hook(lambda gradient: exhaust())
            seen.append((batch.dataset, batch.inputs.clone()))
            return total

        def exhaust():
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

        change_losses(monkeypatch, fill)
        return seen

    return install


MEMORY = {"guards.out_of_memory": True, "training.batch_size": 8, "training.accum_steps": 2}


def test_a_microbatch_that_does_not_fit_is_halved_and_its_pairs_are_trained_on(
    tiny_config, train_here, tmp_path, little_memory
):
    seen = little_memory(4)
    events = train_here(tiny_config(**MEMORY), tmp_path / "run")
    (act,), (flip,) = of(events, "guard"), of(events, "flip")
    assert act["action"] == "shrink" and act["step"] == 0 and act["revision"] == flip["revision"]
    assert flip["changes"] == {"training.batch_size": 4, "training.accum_steps": 4}
    steps = of(events, "step")
    assert [event["step"] for event in steps] == list(range(1, len(steps) + 1)) and of(events, "end")
    assert torch.equal(seen[0][1][:4], seen[1][1]), "the same pairs again"


def test_a_failing_step_leaves_no_gradient(tiny_setup, little_memory):
    setup = tiny_setup(**MEMORY, **{"training.amp": True, "training.amp_dtype": "float16"})
    little_memory(4)
    with pytest.raises(torch.OutOfMemoryError):
        setup.step(batches(setup), 0)
    scale = setup.scaler.get_scale()
    setup.discard_step()
    assert all(parameter.grad is None for parameter in setup.model.parameters())
    assert setup.scaler.get_scale() == scale


def test_a_single_pair_that_does_not_fit_ends_the_run_honestly(tiny_config, train_here, tmp_path, little_memory):
    little_memory(0)
    with pytest.raises(RunError, match="microbatches of 1.*no microbatch is smaller"):
        train_here(tiny_config(**MEMORY), tmp_path / "run")
    shrunk = of(runfolder.read_events(tmp_path / "run"), "guard", action="shrink")
    assert [act["size"][0] for act in shrunk] == [8, 4, 2]


def test_without_the_guard_memory_that_runs_out_ends_the_run(tiny_config, train_here, tmp_path, little_memory):
    little_memory(4)
    with pytest.raises(torch.OutOfMemoryError):
        train_here(tiny_config(**{**MEMORY, "guards.out_of_memory": False}), tmp_path / "run")
    assert not of(runfolder.read_events(tmp_path / "run"), "guard")


def test_a_step_that_fails_while_weights_change_is_not_taken_again(tiny_config, train_here, tmp_path, monkeypatch):
    def step(self, closure=None):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(torch.optim.AdamW, "step", step)
    with pytest.raises(RunError, match="while weights were changing"):
        train_here(tiny_config(**MEMORY), tmp_path / "run")


def test_a_refused_change_does_not_repeat_the_step_forever(
    tiny_config, train_here, tmp_path, little_memory, monkeypatch
):
    def refuse(self, new):
        raise ConfigError(["no smaller microbatch today"])

    little_memory(4)
    monkeypatch.setattr(Setup, "update", refuse)
    with pytest.raises(RunError, match="training.batch_size, training.accum_steps could not be changed"):
        train_here(tiny_config(**MEMORY), tmp_path / "run")


def test_the_microbatch_grows_again_and_waits_twice_as_long_after_a_relapse():
    history, config = MemoryHistory(), GuardsConfig(out_of_memory=True, regrow_steps=10)
    history.take("shrink", (8, 1), 5)
    assert history.due(14, (4, 2), config) is None
    assert history.due(15, (4, 2), config) == (8, 1)
    history.take("grow", (4, 2), 15)
    history.take("shrink", (8, 1), 16)
    assert history.due(35, (4, 2), config) is None
    assert history.due(36, (4, 2), config) == (8, 1)


def test_growing_ends_at_the_configured_size_and_yields_to_another_choice():
    history, config = MemoryHistory(), GuardsConfig(out_of_memory=True, regrow_steps=1)
    history.take("shrink", (8, 1), 0)
    assert history.due(100, (8, 1), config) is None
    assert history.due(100, (6, 1), config) is None
    assert history.due(200, (4, 2), config) is None, "somebody chose a size in between"


def test_a_live_run_shrinks_grows_and_remembers_over_launches(tiny_config, train_here, tmp_path, little_memory):
    little_memory(4)
    config = tiny_config(**{**MEMORY, "guards.regrow_steps": 2, "checkpoint.interval": 1})
    events = train_here(config, tmp_path / "run")
    acts = [(event["action"], event["step"]) for event in of(events, "guard")]
    assert acts[:5] == [("shrink", 0), ("grow", 2), ("shrink", 2), ("grow", 6), ("shrink", 6)]
    again = MemoryHistory()
    for event in of(events, "guard"):
        again.take(event["action"], tuple(event["size"]), event["step"])
    assert again.relapses >= 2 and again.full == (8, 2)


@pytest.fixture
def crashed(tmp_path):
    """`crashed(out_of_memory=True, batch_size=6)`: a supervisor whose ranks have ended, and their verdict."""

    def make(out_of_memory=True, **training):
        overlay = {"training": training, "guards": {"out_of_memory": out_of_memory}}
        folder = runfolder.create(overlays.resolve(overlay), tmp_path / "run")
        failure = {"rank": 1, "time": 0.0, "step": 3, "type": "OutOfMemory", "message": "too large", "disk_full": False}
        runfolder.write_json(folder / "failure.rank1.json", failure)
        return Supervisor(folder), postmortem.examine(folder, 1, 0, num_ranks=2)

    return make


def test_relaunches_for_memory_end_at_single_pairs(crashed):
    supervisor, end = crashed(batch_size=6, accum_steps=2)
    assert end.out_of_memory and end.crashed
    runfolder.write_control(supervisor.folder, {"optimizer.lr": 1e-4})
    sizes = []
    while supervisor._shrink(end.cause):
        overlay = runfolder.read_control(supervisor.folder).overlay
        sizes.append((overlay["training.batch_size"], overlay["training.accum_steps"]))
    assert sizes == [(3, 4), (1, 12)] and overlay["optimizer.lr"] == 1e-4
    acts = runfolder.read_events(supervisor.folder, ("guard",))
    assert [act["revision"] for act in acts] == [2, 3] and acts[0]["reason"] == end.cause


def test_a_refused_request_for_less_is_not_made_again(crashed):
    supervisor, end = crashed(batch_size=6)
    assert supervisor._shrink(end.cause)
    events = runfolder.EventWriter(supervisor.folder)
    events.write("flip", 0, revision=1, applied=False)
    assert not supervisor._shrink(end.cause)


def test_without_the_guard_nothing_is_relaunched_for_memory(crashed):
    supervisor, end = crashed(out_of_memory=False, batch_size=8)
    assert not supervisor._shrink(end.cause) and not runfolder.read_events(supervisor.folder, ("guard",))


# -- optimizer offload ---------------------------------------------------------------------------------------------


class Panel:
    """A guards' world without CUDA: a setup whose config obeys, and flips that measured what a test says."""

    def __init__(self, folder, config):
        self.setup, self.config = self, config
        self.skipped, self.ranks, self.after, self.before = "", Ranks(), None, []
        self.folder = runfolder.create(config, folder)
        self.events = runfolder.EventWriter(folder)
        self.guards = guards.Guards(folder, self, self, self.ranks, self.events)
        self.step = 0

    def obey(self, **more):
        """Apply what control.json asks for, as a run does at a step boundary."""
        control, old = runfolder.read_control(self.folder), self.config
        changes = {**control.overlay, **more}
        self.config = old.model_copy(
            update={"training": old.training.model_copy(update={"cpu_offload_optimizer": changes[OFFLOAD]})}
        )
        self.events.write(
            "flip", self.step, revision=control.revision, applied=True, changes={OFFLOAD: changes[OFFLOAD]}
        )
        return control.revision

    def measure(self, revision, on, ratio, spread=0.01, **more):
        changes = {OFFLOAD: on, **more}
        ci = [ratio - spread, ratio + spread]
        told = fields("flip_effect", revision=revision, changes=changes, ratio=ratio, ci95=ci)
        self.events.write("flip_effect", self.step, **told)

    def after_step(self):
        self.step += 1
        self.guards.after_step(self.step, torch.tensor(1.0), {}, torch.tensor(1.0))
        return of(runfolder.read_events(self.folder), "guard")


@pytest.fixture
def panel(tmp_path):
    """`panel(on)`: a run with a limit of 10 %, offload on or off from the start."""

    def make(on: bool) -> Panel:
        overlay = {OFFLOAD: on, "training.grad_clip": None, "guards.offload_overhead": 0.1}
        return Panel(tmp_path / "run", overlays.resolve(overlay))

    return make


@pytest.mark.parametrize(("ratio", "acts"), [(0.8, ["off"]), (0.95, []), (1.2, []), (0.905, [])])
def test_offload_is_switched_off_where_its_whole_interval_is_above_the_limit(panel, ratio, acts):
    run = panel(False)
    runfolder.write_control(run.folder, {OFFLOAD: True})
    run.measure(run.obey(), True, ratio)
    assert [event["action"] for event in run.after_step()] == acts
    if acts:
        assert runfolder.read_control(run.folder).overlay == {OFFLOAD: False}


def test_a_flip_of_more_than_offload_says_nothing_about_offload(panel):
    run = panel(False)
    runfolder.write_control(run.folder, {OFFLOAD: True})
    run.measure(run.obey(), True, 0.5, **{"training.batch_size": 20})
    assert not run.after_step()


@pytest.mark.parametrize(("ratio", "end"), [(1.05, "on"), (1.5, "keep off")])
def test_offload_that_was_on_from_the_start_is_tried_without_once(panel, ratio, end):
    run = panel(True)
    assert not run.after_step(), "no window yet"
    run.before = [(8.0, 0.1)] * flips.WINDOW_STEPS
    (trial,) = run.after_step()
    assert trial["action"] == "trial" and trial["changes"] == {OFFLOAD: False}
    run.measure(run.obey(), False, ratio)
    assert [event["action"] for event in run.after_step()] == ["trial", end]
    run.obey()
    assert len(run.after_step()) == 2, "not tried again"
    assert run.config.training.cpu_offload_optimizer == (end == "on")


def test_a_trial_that_another_flip_interrupts_is_undone(panel):
    run = panel(True)
    run.before = [(8.0, 0.1)] * flips.WINDOW_STEPS
    run.after_step()
    revision = run.obey()
    run.events.write("flip", 3, revision=revision + 1, applied=True, changes={"optimizer.lr": 1e-4})
    assert run.after_step()[-1]["action"] == "on"
    assert OffloadTrial().is_due() and run.guards.offload.is_due()


def test_overhead_is_the_same_from_either_direction():
    on = {"kind": "flip_effect", "changes": {OFFLOAD: True}, "ratio": 0.8, "ci95": [0.75, 0.85]}
    off = {"kind": "flip_effect", "changes": {OFFLOAD: False}, "ratio": 1.25, "ci95": [1 / 0.85, 1 / 0.75]}
    assert guard_policies.overhead(on) == pytest.approx(guard_policies.overhead(off))
    assert guard_policies.overhead(on) == pytest.approx((0.25, 0.1765, 1 / 3), abs=1e-4)


# -- validation against a reference --------------------------------------------------------------------------------

PHASE_3 = {"training.inverse_loss_frequency": 4, "training.query_sampling.num_queries": 1024}
COMPARED = {"stages.operator.epochs": 2, "training.lambda_inv_enc": 0.1}


def reference(folder, config, *curve):
    """A run folder with these validations after epochs 1, 3, 5, ..."""
    folder.mkdir()
    configs.save(config, folder / "config.yaml")
    events = runfolder.EventWriter(folder)
    for number, value in enumerate(curve):
        scores = {"advection": value, "darcy": value}
        events.write("eval", number, **fields("eval", epoch=2 * number + 1, val_nrmse=scores))
    events.close()
    return {"guards.validation_reference": str(folder)}


def test_falling_behind_the_reference_switches_phase_3_off_once(tiny_config, train_here, tmp_path):
    overlay = {**COMPARED, **PHASE_3, **reference(tmp_path / "a", tiny_config(**COMPARED), 1e-6, 1e-6)}
    events = train_here(tiny_config(**overlay), tmp_path / "run")
    (act,), (flip,) = of(events, "guard"), of(events, "flip")
    assert act["action"] == "off" and act["epoch"] == 1 and act["revision"] == flip["revision"]
    assert flip["phases"] == {"loss_frequency": False}


def test_keeping_up_with_the_reference_changes_nothing(tiny_config, train_here, tmp_path):
    overlay = {**COMPARED, **PHASE_3, **reference(tmp_path / "a", tiny_config(**COMPARED), 1e6, 1e6)}
    assert not of(train_here(tiny_config(**overlay), tmp_path / "run"), "guard")


def test_falling_behind_without_phase_3_is_one_warning(tiny_config, train_here, tmp_path):
    overlay = {**COMPARED, **reference(tmp_path / "a", tiny_config(**COMPARED), 1e-6, 1e-6)}
    events = train_here(tiny_config(**overlay), tmp_path / "run")
    (act,) = of(events, "guard")
    assert act["action"] == "warning" and act["revision"] is None and not of(events, "flip")


def test_the_reference_is_read_between_its_validations_and_not_beyond(tiny_config, tmp_path):
    overlay = reference(tmp_path / "a", tiny_config(), 1.0, 0.5)
    curve = guard_policies.Reference(overlay["guards.validation_reference"], tiny_config())
    assert curve.at("darcy", 2) == pytest.approx(0.75)
    assert curve.at("darcy", 4) is None and curve.at("darcy", 0.5) is None and curve.at("burgers", 2) is None


@pytest.mark.parametrize("what", ["missing", "empty", "other data"])
def test_a_reference_that_cannot_serve_is_an_error_at_the_start(tiny_config, train_here, tmp_path, what):
    overlay = {"guards.validation_reference": str(tmp_path / "a")}
    if what != "missing":
        theirs = tiny_config(**{"data.split.test_fraction": 0.2} if what == "other data" else {})
        reference(tmp_path / "a", theirs, *([] if what == "empty" else [1.0]))
    with pytest.raises(ConfigError, match="validation_reference.*a "):
        train_here(tiny_config(**overlay), tmp_path / "run")
    assert not of(runfolder.read_events(tmp_path / "run"), "step")


# -- compilation ---------------------------------------------------------------------------------------------------


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


def test_what_is_compiled_already_is_not_tried_out_again(tiny_setup, eager_compiler, monkeypatch):
    setup = tiny_setup(**{"training.compile": True})
    setup.try_compile()
    monkeypatch.setattr(Setup, "_probe", lambda _: pytest.fail("tried out again"))
    setup.update(overlays.apply(setup.config, {"optimizer.lr": 1e-4}))
    setup.try_compile()


# -- several ranks -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory, tiny_config):
    """A run whose rank 1 alone cannot compile, then runs out of memory, then has a loss of NaN; rank 0 is well."""
    folder = tmp_path_factory.mktemp("guarded") / "run"
    config = tiny_config(
        **{"training.num_gpus": 2, "training.batch_size": 4, "training.accum_steps": 2, "training.compile": True},
        **{"training.ema_decay": 0.9, "checkpoint.interval": 2, "optimizer.name": "adamw"},
        **{"guards.compile_failure": "off", "guards.out_of_memory": True, "guards.nonfinite": "stop"},
    )
    run = handle.start(config, folder, attached=True, worker=WORKER)
    try:
        assert run.wait() == "finished", run.log_tail()
    finally:
        run._process.kill()
    return run


@pytest.mark.slow
def test_ranks_agree_before_the_first_step_that_one_of_them_cannot_compile(two_ranks):
    (act,) = of(two_ranks.events(), "guard", guard="compile_failure")
    assert act["reason"].startswith("rank 1: ") and "rank 0" not in act["reason"]
    flip = of(two_ranks.events(), "flip", revision=act["revision"])[0]
    assert flip["applied"] and flip["changes"] == {"training.compile": False} and flip["step"] == 0


@pytest.mark.slow
def test_a_rank_out_of_memory_is_relaunched_with_half_the_microbatch_and_loses_no_step(two_ranks):
    (act,) = of(two_ranks.events(), "guard", guard="out_of_memory")
    assert act["changes"] == {"training.batch_size": 2, "training.accum_steps": 4} and act["size"] == [4, 2]
    segments = two_ranks.manifest["segments"]
    assert [segment["status"] for segment in segments] == ["failed", "finished"]
    assert two_ranks.config.training.max_restarts == 0
    (failure,) = [f for f in segments[0]["failures"] if f["rank"] == 1]
    assert failure["out_of_memory"] and failure["type"] == "OutOfMemory"
    second = of(two_ranks.events(), "flip", revision=act["revision"])
    assert second and second[0]["applied"] and second[0]["changes"]["training.batch_size"] == 2
    steps = [event["step"] for event in two_ranks.events(("step",))]
    assert steps == [1, 2, 3, *range(3, steps[-1] + 1)], "from the checkpoint at step 2 on"


@pytest.mark.slow
def test_a_loss_of_nan_on_one_rank_is_skipped_by_all_alike(two_ranks):
    skips = of(two_ranks.events(), "guard", guard="nonfinite")
    assert [skip["action"] for skip in skips] == ["skip"]
    records = [json.loads((two_ranks.folder / f"ended.rank{rank}.json").read_text()) for rank in (0, 1)]
    assert records[0]["skipped"] == records[1]["skipped"] == [skips[0]["step"]]
    assert records[0]["weights"] == records[1]["weights"] and records[0]["average"] == records[1]["average"]
    assert records[0]["finite"]
