"""A machine that is taken away while a run trains: on the next one the run goes on from its mirror."""

import shutil

import pytest
from waiting import until

from upsnb import overlays
from upsnb.runs import checkpoint_index, handle, processes, runfolder


@pytest.mark.long
def test_a_run_goes_on_after_its_machine_was_lost_on_another_number_of_ranks(tiny_config, tmp_path):
    (tmp_path / "drive").mkdir()
    config = tiny_config(("darcy",), **{
        "stages.operator.epochs": 100_000, "checkpoint.interval": 5, "checkpoint.resume": True,
        "checkpoint.mirror.folder": str(tmp_path / "drive"), "training.ema_decay": 0.9, "training.batch_size": 8,
    })  # fmt: skip
    folder, drive = tmp_path / "run", tmp_path / "drive" / "run"
    run = handle.start(config, folder, attached=True)
    until(lambda: checkpoint_index.is_there(drive) and checkpoint_index.read_index(drive)["previous"])
    identity = run.manifest["supervisor"]
    run._process.kill()
    until(lambda: run.status() == "died" and not processes.marked(identity))
    shutil.rmtree(folder)
    index = checkpoint_index.read_index(drive)
    kept = index["checkpoints"][index["latest"]]["step"]
    assert kept > 0

    ranks = {"training.num_gpus": 2, "training.batch_size": 4, "training.use_fsdp2": True}
    run = handle.start(overlays.apply(config, ranks), folder, attached=True)
    try:
        run.wait_for("step", step=kept + 7)
    finally:
        run.stop()
    assert run.wait() == "finished"
    new = [event["step"] for event in run.events() if event["kind"] == "step"]
    start = [event for event in run.events() if event["kind"] == "start"][-1]
    assert start["step"] == kept and start["num_ranks"] == 2
    assert {1, *range(kept + 1, max(new) + 1)} <= {*new}, "the curve of the lost machine, and what came after"
    assert run.manifest["mirror"]["step"] == max(new), "the last checkpoint is there when the run has ended"
    assert runfolder.read_events(folder, ("warning",)) == []
