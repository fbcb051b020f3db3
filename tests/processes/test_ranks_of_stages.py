"""Stages on 2 and 4 real ranks: judged on each sample once, leaving whole weights, gone on with after a kill."""

import os
import signal

import pytest
from waiting import until

from upsnb.data.datasets import open_all
from upsnb.runs import handle, runfolder
from upsnb.training import evaluation, gates
from upsnb.training.parallel import Ranks

THREE = {
    "stages.finetune.epochs": 1,
    "stages.crps.epochs": 2,
    "evaluation.members": 4,
    "training.ema_decay": 0.9,
    "data.split.validation_fraction": 0.45,  # 9 of 20: no number of ranks shares them evenly
}


def judged_again(run: handle.Run, stage: str) -> dict:
    """What a stage's weights are worth, measured by this process alone."""
    config = run.config
    datasets = open_all(config, runfolder.project_root(), lambda message: None)
    return evaluation.evaluate_ensembles(
        run.load_model(stage=stage), datasets, "validation", config.evaluation, Ranks()
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_ranks", "sharded"), [(2, True), pytest.param(4, False, marks=pytest.mark.long)], ids=["2 fsdp", "4 ddp"]
)
def test_ranks_measure_together_what_one_alone_finds_of_the_weights_they_left(
    num_ranks, sharded, tiny_config, tmp_path
):
    ranks = {"training.num_gpus": num_ranks, "training.batch_size": 8 // num_ranks, "training.use_fsdp2": sharded}
    drawn = {"stages.diff_residual.epochs": 1}
    run = handle.start(tiny_config(**THREE, **drawn, **ranks), tmp_path / "run", attached=True)
    assert run.wait() == "finished", run.log_tail()
    events = {event["stage"]: event for event in run.events(("gate",))}
    harmed = {stage for stage, event in events.items() if event["verdict"] == "harm"}
    for stage in run.config.stages.planned:
        there, again = runfolder.measured(run.folder, stage), judged_again(run, stage)
        for name, found in again.items():
            ours, theirs = (
                dict(zip(each["samples"], each["per_sample"]["crps"], strict=True)) for each in (there[name], found)
            )
            assert len(ours) == len(there[name]["samples"]) and ours.keys() <= theirs.keys(), "each sample once"
            assert len(ours) == len(theirs) or (stage in harmed and len(ours) == gates.FEWEST)
            assert ours == pytest.approx({sample: theirs[sample] for sample in ours}, rel=1e-3)
            assert there[name]["members"] == found["members"] == (4 if stage in ("crps", "diff_residual") else 1)
    assert [event["against"] for event in events.values()][:2] == ["operator", "finetune"]
    for stage, event in events.items():
        expected = gates.compared(*(runfolder.measured(run.folder, one) for one in (stage, event["against"])))
        assert {key: events[stage][key] for key in expected} == expected
    passed = [stage for stage, event in events.items() if event["verdict"] == "pass"]
    assert run.manifest["answers"] == ([*passed] or ["operator"])[-1]


@pytest.mark.long
def test_ranks_that_are_killed_in_a_later_stage_go_on_in_it(tiny_config, tmp_path):
    ranks = {"training.num_gpus": 2, "training.batch_size": 4, "training.max_restarts": 1, "checkpoint.interval": 3}
    long = {"stages.crps.epochs": 12}
    run = handle.start(tiny_config(**{**THREE, **long}, **ranks), tmp_path / "run", attached=True)

    def well_inside() -> bool:
        steps = [event for event in run.events(("step",)) if event["stage"] == "crps"]
        return len(steps) > 8

    try:
        until(well_inside)
        os.kill(runfolder.read_heartbeats(run.folder)[1]["pid"], signal.SIGKILL)
        assert run.wait() == "finished", run.log_tail()
    finally:
        run._process.kill()
    started = [event["stage"] for event in run.events(("start",))]
    assert started == ["operator", "finetune", "crps", "crps"]
    assert [event["stage"] for event in run.events(("gate",))] == ["finetune", "crps"], "none is judged again"
    steps = [event["step"] for event in run.events(("step",))]
    assert {*steps} == {*range(1, max(steps) + 1)}, "no step is missing"
