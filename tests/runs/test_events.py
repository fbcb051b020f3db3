"""Events of other versions and half-written disks: what can be read is, the rest is counted, and no reader stumbles."""

import contextlib
import json
import math

import pytest
from made_runs import finished, make_event

from upsnb.compare import figures, verdict
from upsnb.config import StagesConfig
from upsnb.errors import RunError
from upsnb.report import results
from upsnb.runs import events, postmortem, recovery, runfolder, table, throughput
from upsnb.widgets import charts, html
from upsnb.widgets.history import History
from upsnb.widgets.progress import Progress
from upsnb.worker.flips import steady_steps_before
from upsnb.worker.guard_policies import OffloadTrial, overhead

MEASURED = {"revision": 2, "changes": {"training.amp": True}, "phases": {"bf16": True}}
MORE = [  # kinds that a finished run of `made_runs` has none of
    make_event(
        "flip", 20, changes={"training.amp": True}, phases={"bf16": True}, phases_on=["bf16"], skipped={"fused": "no"}
    ),
    make_event("flip_effect", 30, changes={"training.cpu_offload_optimizer": True}),
    {"kind": "measuring", "step": 30, "applied": True, "reason": None, **MEASURED},
    {"kind": "turn", "step": 31, "revision": 2, "arm": 1, "num_rounds": 1, "median": 1.2, "ci95": [1.1, None]},
    make_event("relaunch", 32, phases_on=["bf16"]),
    {"kind": "paused", "step": 33, "revision": 3},
    {"kind": "resumed", "step": 33, "revision": 4, "paused_s": 1.0},
    {"kind": "restored", "step": 34, "revision": 5, "applied": True, "reason": None, "from_step": 20},
    {"kind": "checkpoint", "step": 35, "revision": None},
    {"kind": "profile", "step": 36, "revision": 6, "files": []},
    {"kind": "telemetry", "step": 37, "utilisation_percent": [3.0, None], "power_w": [9.0], "clock_mhz": [1]},
    {"kind": "progress", "step": 38, "message": "reading"},
    {"kind": "warning", "step": 39, "message": "slow"},
    {
        "kind": "gate",
        "step": 39,
        "against": "operator",
        "verdict": "pass",
        "ratio": 0.8,
        "ci95": [0.7, None],
        "mean_ratio": 0.9,
        "perturbed_ratio": 1.1,
        "perturbed_ci95": [None, 1.2],
        "samples": 9,
    },
    {"kind": "guard", "step": 40, "guard": "out_of_memory", "action": "shrink", "reason": "full", "size": [8, 2]},
]
WRONG = (None, "x", -1, 1.5, True, [], {}, {"x": "y"}, ["x"], math.inf, 10**400, [[1]], {"x": {}})


@pytest.fixture
def run(tmp_path):
    return finished(tmp_path / "run")


def lines(run) -> list[dict]:
    """What a run said, and after it an event of each other kind."""
    said = [json.loads(line) for line in events.events_path(run.folder).read_text().splitlines()]
    return [*said[:-1], *({**more, "time": said[-1]["time"]} for more in MORE), said[-1]]


def read_by_all(run, told: list[dict]) -> None:
    """Let everybody who reads runs read one that told this."""
    events.events_path(run.folder).write_text("".join(json.dumps(one) + "\n" for one in told))
    said, progress = run.events(), Progress(lambda line: None)
    for one in said:
        progress(one)
    history = History(run.folder)
    history.read()
    for axis in ("step", "time"):
        charts.svg(history, axis, True)
    (
        html.header(history, "a run", "running", None, StagesConfig(), 1.0, 0.0, None),
        html.flips(history, {}),
        html.warning(history),
    )
    [history.answer(revision, "bf16") for revision in range(7)]
    with contextlib.suppress(RunError):  # without a validation there is nothing to compare
        verdict.run_summary(run, results.run_numbers(run), 1.0)
    assert table.row(run.folder, "run")["status"] == "finished"
    figures._curves(said, True), throughput.turns_with(said)
    postmortem.ended(run.folder, 0), runfolder.last_answered(run.folder), steady_steps_before(said)
    trial = OffloadTrial()
    [trial.take_flip(one) for one in run.events(("flip",))]
    [overhead(one) for one in run.events(("flip_effect",))]
    recovery.ask_for_less(run.folder, run.config, run.config, "full", 3)


def test_every_kind_that_a_run_writes_is_told_in_full(run):
    assert {one["kind"] for one in lines(run)} == events.FIELDS.keys()
    for one in lines(run):
        assert events._whole(one) is not None, one
    read_by_all(run, lines(run))


@pytest.mark.parametrize("how", ["missing", "wrong"])
def test_no_reader_stumbles_over_an_event_without_a_field_or_with_another_type(run, how):
    """The last event of every kind loses or changes its n-th field; all other fields in turn."""
    said = lines(run)
    last = {one["kind"]: number for number, one in enumerate(said)}
    for turn in range(max(len(said[number]) for number in last.values())):
        damaged = [dict(one) for one in said]
        for kind, number in last.items():
            names = [name for name in damaged[number] if name != "kind"]
            name = names[turn % len(names)]
            if how == "missing":
                del damaged[number][name]
            else:
                damaged[number][name] = WRONG[(turn + len(kind)) % len(WRONG)]
        read_by_all(run, damaged)


def test_lines_that_are_no_events_are_left_out_and_counted_once(tmp_path):
    good = [{**make_event("eval", step), "time": 5.0 + step} for step in (1, 2)]
    odd = ['{"kind": "eval", "time": 6.5, "step": 2}', "[]", "3", '{"kind": "paused", "time": 1, "step": 1e999}', "{"]
    texts = [json.dumps(good[0]), *odd, json.dumps(good[1])]
    events.events_path(tmp_path).write_text("".join(f"{text}\n" for text in texts))
    first, warning, second = events.read_events(tmp_path)
    assert (first["step"], second["step"], warning["kind"]) == (1, 2, "warning")
    assert "5 of 7 lines" in warning["message"] and '"step": 2}' in warning["message"] and warning["time"] < 100
    assert [one["step"] for one in events.read_events(tmp_path, ("eval",))] == [1, 2], (
        "who reads one kind gets no other"
    )
    assert events.last_events(tmp_path, ("eval", "paused")).keys() == {"eval"}


def test_fields_that_older_versions_did_not_write_are_filled_in(tmp_path):
    old = {"kind": "flip", "time": 1.0, "step": 3, "revision": 2, "applied": False}
    events.events_path(tmp_path).write_text(json.dumps(old) + "\n" + json.dumps({**old, "kind": "unknown"}) + "\n")
    flip, unknown = events.read_events(tmp_path)
    assert (flip["changes"], flip["skipped"], flip["cold"], flip["reason"]) == ({}, {}, False, None)
    assert unknown["kind"] == "unknown", "of a newer version"


def test_what_names_no_unit_and_no_error_is_of_fields():
    assert events.naming({}) == events.naming(events.latest_start([])) == {"unit": "samples", "metric": "nRMSE"}
    started = [make_event("start", 0, metric="perplexity"), make_event("start", 9, unit="tokens"), make_event("end", 9)]
    assert events.naming(events.latest_start(started)) == {"unit": "tokens", "metric": "nRMSE"}, "the latest says"
