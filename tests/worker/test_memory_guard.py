"""Memory that runs out: a smaller microbatch in the same run, in a relaunch, and back again."""

import pytest
import torch
from guarded import batches, change_losses
from made_runs import of

from upsnb import overlays
from upsnb.config import GuardsConfig
from upsnb.errors import ConfigError, RunError
from upsnb.runs import postmortem, recovery, runfolder
from upsnb.runs.supervisor import Supervisor
from upsnb.training.setup import Setup
from upsnb.worker.guard_policies import MemoryHistory


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
