"""Progress in lines: means every few seconds, validations as they come, changes and what was refused."""

import re

from made_runs import END, START, step

from upsnb.config import StagesConfig
from upsnb.widgets import html, progress
from upsnb.widgets.history import History


def test_progress_prints_means_every_few_seconds_and_validation_when_it_comes():
    lines: list[str] = []
    follow = progress.Progress(lines.append)
    follow({"kind": "start", "step": 0, **START, "time_limit_s": 12.0})
    for n in range(1, 101):
        follow(step(n, names=[("waves", "darcy")[n % 2]], loss=n % 2 + 0.0))
    follow({"kind": "eval", "step": 100, "val_nrmse": {"waves": 0.25, "darcy": None}, "best": False})
    follow({"kind": "checkpoint", "step": 100})
    follow({"kind": "end", "step": 100, **END})
    assert lines[0].startswith("1,234 parameters on 1 x cpu")
    assert lines[2] == "step 51 | epoch 1 | loss darcy 1, waves 0 | 160 samples/s | 5 s, 5 s left"
    assert lines[-3:] == [
        "step 100 | validation nRMSE: waves 0.25, darcy not finite",
        "step 100 | epoch 1 | loss darcy 1, waves 0 | 160 samples/s | 10 s, 0 s left",
        "ended by time after 10 s of training",
    ]
    assert len(lines) == 6


def test_a_later_stage_has_a_name_and_a_clock_of_its_own(tmp_path):
    lines: list[str] = []
    follow = progress.Progress(lines.append)
    began = {"stage": "finetune", "stage_from_step": 1000, "stage_from_s": 100.0, "total_steps": 1200}
    start = {"kind": "start", "step": 1000, **START, **began, "time_limit_s": None}
    follow(start)
    assert lines[0].startswith("finetune: 1,234 parameters")
    assert progress.progress(start, 1050, 110.0) == (0.25, 30.0)
    assert progress.progress({**start, "time_limit_s": 20.0}, 1050, 110.0) == (0.5, 10.0)
    stages = StagesConfig(finetune={"epochs": 7})
    shown = History(tmp_path)
    shown.start = start
    header = html.header(shown, "a run", "running", None, stages, 0.0, 0.0, None)
    assert "<b>finetune</b>, stage 2 of 2" in header and "of 7<" in header
    alone = html.header(shown, "a run", "running", None, StagesConfig(), 0.0, 0.0, None)
    assert "stage" not in alone, "a run of one stage needs no name for it"


def test_progress_says_what_was_changed_and_what_was_refused():
    lines: list[str] = []
    follow = progress.Progress(lines.append)
    follow({"kind": "relaunch", "step": 9, "changes": {"training.num_gpus": 2}})
    skipped = {"nccl": "no second device"}
    change = {"kind": "flip", "step": 10, "revision": 3, "changes": {"training.num_gpus": 2}, "skipped": skipped}
    follow({**change, "applied": True, "reason": None})
    follow({**change, "applied": False, "reason": "too few pairs"})
    follow({"kind": "paused", "step": 12})
    follow({"kind": "resumed", "step": 12, "paused_s": 65.0})
    assert lines == [
        "step 9: saved, to be launched again with training.num_gpus 2",
        "step 10: change 3: training.num_gpus 2; skipped nccl: no second device",
        "step 10: change 3 was refused: too few pairs",
        "step 12: paused",
        "step 12: goes on after a pause of 1 min 5 s",
    ]


def test_progress_survives_a_loss_that_is_not_finite():
    lines: list[str] = []
    progress.Progress(lines.append)(step(1, loss=None))
    assert "loss not finite" in lines[0]


def test_of_a_thousand_rewritten_lines_an_executed_notebook_keeps_the_last(capsys):
    for turn in range(1000):
        progress.rewrite(f"turn {turn}")
    print("done")
    said = capsys.readouterr().out
    kept = re.sub(r".*\r(?=[^\n])", "", said)  # as nbclient does where streams are coalesced
    assert kept == "done\n" and max(map(len, said.split("\r"))) == 79
