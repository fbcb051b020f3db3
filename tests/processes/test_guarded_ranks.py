"""Guards on two real ranks: what one of them meets, all act on alike."""

import json
from pathlib import Path

import pytest
from made_runs import of

from upsnb.runs import handle

pytestmark = pytest.mark.long
WORKER = Path(__file__).with_name("guarded_worker.py")


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


def test_ranks_agree_before_the_first_step_that_one_of_them_cannot_compile(two_ranks):
    (act,) = of(two_ranks.events(), "guard", guard="compile_failure")
    assert act["reason"].startswith("rank 1: ") and "rank 0" not in act["reason"]
    flip = of(two_ranks.events(), "flip", revision=act["revision"])[0]
    assert flip["applied"] and flip["changes"] == {"training.compile": False} and flip["step"] == 0


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


def test_a_loss_of_nan_on_one_rank_is_skipped_by_all_alike(two_ranks):
    skips = of(two_ranks.events(), "guard", guard="nonfinite")
    assert [skip["action"] for skip in skips] == ["skip"]
    records = [json.loads((two_ranks.folder / f"ended.rank{rank}.json").read_text()) for rank in (0, 1)]
    assert records[0]["skipped"] == records[1]["skipped"] == [skips[0]["step"]]
    assert records[0]["weights"] == records[1]["weights"] and records[0]["average"] == records[1]["average"]
    assert records[0]["finite"]
