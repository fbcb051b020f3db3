"""The command line on runs that are there: what it prints, what it asks of them, what it refuses in one sentence."""

import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from made_runs import START, finished, make_event, step, write_run
from waiting import LONGEST_S

from upsnb import __main__ as command
from upsnb.runs import handle, runfolder

ROOT = Path(__file__).resolve().parents[1]
EVENTS = [{"kind": "segment", "step": 0, "number": 0}, {"kind": "start", "step": 0, **START}]


@pytest.fixture
def outputs(tmp_path, monkeypatch) -> Path:
    """The outputs/ of a project, which the test stands in."""
    for name in ("params", "notebooks", "outputs"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(runfolder, "last_answered", lambda folder: 0)  # answers are made up before they are asked for
    return tmp_path / "outputs"


@pytest.fixture
def said(capsys):
    """Run a command that goes well, and return what it prints."""

    def run(*arguments) -> str:
        assert command.main([str(argument) for argument in arguments]) == command.OK
        printed = capsys.readouterr()
        assert printed.err == ""
        return printed.out

    return run


@pytest.fixture
def refused(capsys):
    """Run a command that must be refused, and return the one sentence that it says."""

    def run(*arguments) -> str:
        assert command.main([str(argument) for argument in arguments]) == command.REFUSED
        printed = capsys.readouterr()
        assert printed.out == "" and "Traceback" not in printed.err
        return printed.err

    return run


def failed(folder, **segment):
    """A run that failed at its second step; `segment` goes into the manifest."""
    run = write_run(folder, [*EVENTS, step(1), step(2)], status="failed", cause="rank 0 raised ValueError at step 2")
    runfolder.update_manifest(folder, segments=[{"number": 0, **segment}])
    return run


def living(folder, *events):
    """A run that trains, as far as its folder tells."""
    return write_run(folder, [*EVENTS, step(1), *events], status="starting")


# -- which run -----------------------------------------------------------------------------------------------------


def test_a_run_is_its_name_in_outputs_or_a_path(outputs, said, monkeypatch):
    finished(outputs / "ab" / "runs" / "one")
    for name in ("ab/runs/one", "outputs/ab/runs/one", outputs / "ab/runs/one"):
        assert said("show", name).startswith("outputs/ab/runs/one: finished\n")
    monkeypatch.chdir(outputs.parent / "notebooks")
    assert handle.Run.attach("outputs/ab/runs/one").folder == outputs / "ab/runs/one"


@pytest.mark.parametrize("arguments", [
    ("show", "@"), ("resume", "@"), ("stop", "@"), ("flip", "@", "compile", "on"), ("compare", "@", "@"),
    ("export", "@", "--to", "csv"), ("pack", "@"),
])  # fmt: skip
@pytest.mark.parametrize(("name", "hint"), [
    ("trial-1", "did you mean trial-11?"), ("", "python -m upsnb list"), ("no\nsuch\x00", "python -m upsnb list"),
    ("x" * 5000, "python -m upsnb list"), ("..", "not a run folder"), ("notebooks", "not a run folder"),
])  # fmt: skip
def test_a_run_that_is_not_there_is_refused_with_the_nearest(outputs, refused, arguments, name, hint):
    failed(outputs / "trial-11")
    sentence = refused(*(name if argument == "@" else argument for argument in arguments))
    assert hint in sentence and sentence.count("\n") == 1


# -- list, show ----------------------------------------------------------------------------------------------------


def test_list_has_a_line_for_each_run(outputs, said):
    finished(outputs / "good")
    failed(outputs / "bad")
    lines = said("list").splitlines()
    assert lines[0].split()[:5] == ["run", "status", "created", "steps", "samples_per_s"] and "nrmse_waves" in lines[0]
    (good,) = [line for line in lines if line.startswith("good")]
    (bad,) = [line for line in lines if line.startswith("bad")]
    assert "finished" in good and " 59 " in good and " 0.1 " in good and "nan" not in good.lower()
    assert "failed" in bad and "rank 0 raised ValueError at step 2" in bad
    assert said("list", outputs) == "\n".join(lines) + "\n"


def test_list_says_where_there_are_none(outputs, said, refused):
    assert said("list").startswith("no runs in outputs -> python -m upsnb run ")
    assert "nowhere: no such folder" in refused("list", "nowhere")


def test_list_loads_no_torch(outputs):
    finished(outputs / "good")
    code = "import sys; from upsnb import __main__ as m; m.main(['list']); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.endswith("\nFalse\n"), done.stderr


def test_show_tells_what_a_run_reached_without_a_report(outputs, said):
    finished(outputs / "good")
    text = said("show", "good")
    assert "persistence 0.8" in text and "finished on 1 x cpu, 1,234 parameters" in text and "checkpoints: none" in text


def test_show_tells_what_a_run_is_doing_and_was_asked(outputs, said):
    run = living(outputs / "now", make_event("eval", 1))
    run.update({"training.batch_size": 2})
    run.pause()
    text = said("show", "now")
    assert text.startswith("outputs/now: starting, paused\n") and "validation nRMSE: waves 0.3" in text
    assert "asked and not answered yet: pause" in text


@pytest.mark.parametrize("kept", ["traceback", "log"])
def test_show_ends_with_what_a_failed_run_said_last(outputs, said, kept):
    lines = [f"  line {k}" for k in range(50)] + ["ValueError: not a number"]
    text = "\n".join(["Traceback (most recent call last):", *lines])
    failed(outputs / "bad", failures=[{"traceback": text}] if kept == "traceback" else [])
    (outputs / "bad" / runfolder.LOG).write_text(text if kept == "log" else "torchrun's own noise")
    shown = said("show", "bad").splitlines()
    assert shown[-1] == "all of it: outputs/bad/worker.log" and shown[-2] == "ValueError: not a number"
    assert "failed: rank 0 raised ValueError at step 2" in shown and "  line 0" not in shown and "  line 40" in shown


def test_show_tells_a_report_of_another_kind(outputs, said):
    (outputs / "profile").mkdir()
    (outputs / "profile" / "report.json").write_text(json.dumps({"kind": "train", "status": "made up"}))
    assert "made up on" in said("show", "profile")


# -- stop, resume, flip --------------------------------------------------------------------------------------------


def test_only_a_run_that_trains_can_be_asked_for_something(outputs, refused):
    finished(outputs / "good")
    for arguments in (("stop", "good"), ("flip", "good", "compile", "on")):
        assert "good: is finished -> only a run that trains" in refused(*arguments)
    assert runfolder.read_control(outputs / "good").revision == 0


def test_flip_asks_what_the_panel_asks_and_waits_for_the_answer(outputs, said, refused):
    answer = {"kind": "flip", "step": 7, "changes": {"training.compile": True}, "reason": "no compiler"}
    answers = [{**answer, "revision": 1, "applied": True}, {**answer, "revision": 2, "applied": False}]
    run = living(outputs / "now", *answers)
    assert "step 7: change 1: training.compile True" in said("flip", "now", "compile", "on")
    assert runfolder.read_control(run.folder).overlay["training.compile"] is True
    assert "now: compile was refused at step 7: no compiler" in refused("flip", "now", "compile", "off")
    assert runfolder.read_control(run.folder).overlay["training.compile"] is False


def test_a_phase_that_does_not_exist_is_refused(outputs, refused, capsys):
    living(outputs / "now")
    assert "did you mean compile?" in refused("flip", "now", "compil", "on")
    with pytest.raises(SystemExit) as exit_:
        command.main(["flip", "now", "compile", "maybe"])
    assert exit_.value.code == command.REFUSED and "choose from 'on', 'off'" in capsys.readouterr().err


def test_resume_lets_a_paused_run_go_on_and_no_other(outputs, said, refused):
    run = living(outputs / "now", {"kind": "resumed", "step": 4, "revision": 2, "paused_s": 1.0})
    assert "now: is starting and not paused" in refused("resume", "now")
    run.pause()
    assert said("resume", "now") == "goes on at step 4\n" and not runfolder.read_control(run.folder).paused


def test_resume_needs_something_left_to_do_and_a_checkpoint(outputs, refused):
    finished(outputs / "good")
    runfolder.update_manifest(outputs / "good", end_reason="epochs")
    assert "good: has trained to its end (epochs) -> start a new run" in refused("resume", "good")
    failed(outputs / "bad")
    assert "bad: has no whole checkpoint to go on from" in refused("resume", "bad")


# -- compare -------------------------------------------------------------------------------------------------------


def test_compare_tells_what_the_second_run_gains(outputs, said):
    finished(outputs / "one")
    finished(outputs / "two", ms=50.0)
    assert "two against one, 1 seed(s)" in (text := said("compare", "one", "two"))
    assert "throughput over the baseline's: 2.00 (no interval)" in text and not (outputs / "ab").exists()
    figures = "outputs/ab/figures/quality.png\noutputs/ab/figures/outcome.png\n"
    assert said("compare", "one", "two", "-o", outputs / "ab").endswith(figures)
    assert json.loads((outputs / "ab/report.json").read_text())["optimized"] == "two"
    assert "two against one" in said("show", "ab")


def test_runs_that_cannot_be_compared_are_refused(outputs, refused):
    finished(outputs / "one")
    failed(outputs / "bad")
    assert "is compared with itself" in refused("compare", "one", "one")
    assert "only finished runs can be compared" in refused("compare", "one", "bad")


# -- board and sweep -----------------------------------------------------------------------------------------------


def test_board_ranks_what_can_be_ranked_and_writes_a_page(outputs, said, refused):
    path = finished(outputs / "good").folder / "evaluation.json"
    assert "no run can stand on a board: does not say what it is judged by" in refused("board")
    assert [path.name for path in outputs.iterdir()] == ["good"], "no folder is left of what was refused"
    evaluation = json.loads(path.read_text())
    for splits in evaluation["datasets"].values():
        splits["test"]["protocol"] = {"data": "ab"}
    path.write_text(json.dumps(evaluation))
    printed = said("board", "good", "-o", "ranks", "--price", "2")
    assert "- train: 0.1 (1 of 3 seeds)" in printed
    assert printed.endswith("ranks/board.html\nranks/board.csv\nranks/report.json\n")
    assert "- train: 0.1" in said("show", "ranks")


def test_a_sweep_that_cannot_be_is_refused_before_anything_is_made(outputs, refused):
    assert "no such file" in refused("sweep", "s.yaml")
    Path("s.yaml").write_text("grid: {lr: 0.1}")
    assert "grid: lr: got 0.1 -> write a list" in refused("sweep", "s.yaml")
    assert not [*outputs.iterdir()]


# -- the command line itself ---------------------------------------------------------------------------------------


def test_version_names_package_and_code(capsys):
    with pytest.raises(SystemExit) as exit_:
        command.main(["--version"])
    assert exit_.value.code == 0
    assert re.fullmatch(r"upsnb [\d.]+, revision (\w+(-dirty)?)\n", capsys.readouterr().out)


@pytest.mark.parametrize("arguments", [[], ["shw"], ["show"], ["compare", "one"], ["run"], ["list", "a", "b"]])
def test_a_wrong_command_line_is_refused_without_a_traceback(arguments, capsys):
    with pytest.raises(SystemExit) as exit_:
        command.main(arguments)
    assert exit_.value.code == command.REFUSED and "Traceback" not in capsys.readouterr().err


def test_who_reads_no_further_gets_no_traceback():
    call, pipe = [sys.executable, "-m", "upsnb", "data", "list"], subprocess.PIPE
    started = subprocess.Popen(call, cwd=ROOT, stdout=pipe, stderr=pipe)
    started.stdout.close()  # as head does
    assert started.communicate()[1] == b"" and started.returncode == command.FAILED


@pytest.mark.parametrize("path", [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), None], ids=str)
def test_every_command_that_is_documented_can_be_given(path):
    """In documents, and in the examples of --help."""
    text, names = path.read_text() if path else command.EXAMPLES, "run|list|show|resume|stop|flip|compare|board|sweep"
    for line in re.findall(rf"python -m upsnb ((?:{names}|export|pack)\b[^`|\n]*)", text):
        command._parser().parse_args(shlex.split(line.split("   ")[0], comments=True))


@pytest.mark.slow
def test_every_command_on_a_run_that_really_trains(outputs, tiny_config, said):
    config = tiny_config(("darcy",), **{"training.time_limit_s": 15.0, "stages.operator.epochs": 1000000})
    run = handle.start(config, outputs / "live", attached=False)
    run.wait_for("step", timeout_s=LONGEST_S)
    assert said("show", "live").splitlines()[0] in ("outputs/live: running", "outputs/live: starting")  # a moment later
    flipped = said("flip", "live", "activation_checkpointing", "on")
    assert "change 1: operator.pdet.use_activation_checkpoint True" in flipped
    assert "python -m upsnb resume live goes on" in said("stop", "live")
    stopped_at = run.events(("end",))[-1]["step"]
    assert f"checkpoints: latest step {stopped_at}" in said("show", "live")
    resumed = said("resume", "live")
    assert "ended by time" in resumed and "ended by stopped" not in resumed and "figures/loss.png" in resumed
    assert "phases on: activation_checkpointing" in resumed, "what was flipped before stays"
    assert run.events(("end",))[-1]["step"] > stopped_at
    (line,) = [line for line in said("list").splitlines() if line.startswith("live ")]
    assert " finished " in line and "activation_checkpointing" in line
    shutil.copytree(outputs / "live", outputs / "copy")
    assert "throughput over the baseline's: 1.00" in said("compare", "live", "copy", "-o", "ab")
