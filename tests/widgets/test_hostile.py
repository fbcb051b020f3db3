"""Text of a run is text: whatever stands in its events and its manifest, nothing of it becomes markup in the panel."""

import contextlib
import copy
import json
import os
from html.parser import HTMLParser

import ipywidgets
import pytest
from made_runs import fields, make_event
from test_charts import START, effect_event, flip_event, step_event

from upsnb import hardware
from upsnb.runs import events, handle, processes, runfolder
from upsnb.widgets.history import History
from upsnb.widgets.panel import Panel

HOSTILE = "\"'><img src=x onerror=alert(1)><script>$x_{&amp;"
EVENTS = [
    {"kind": "segment", "time": 1000.0, "step": 0, "number": 0},
    {**START, "time_limit_s": 100.0},
    *(step_event(k, epoch=k, optimizer="a", gradient_norm=1.0) for k in range(1, 9)),
    {"kind": "telemetry", "time": 1004.0, "step": 4, "utilisation_percent": [3.0], "power_w": [9.0], "clock_mhz": [1]},
    {"kind": "progress", "time": 1004.0, "step": 4, "message": "reading"},
    {"kind": "eval", "time": 1005.0, "step": 5, **fields("eval", time_s=2.5)},
    {"kind": "checkpoint", "time": 1005.0, "step": 5, "roles": ["best"], "revision": None},
    {**flip_event(1, 5), "skipped": {"fused": "no kernel"}},
    effect_event(1, 6),
    flip_event(2, 6, changes={}, phases={}, skipped={"fused": "no kernel"}),
    flip_event(3, 7, applied=False, changes={}, phases={}, reason="rank 0: 1 problem\n  too few pairs"),
    {**make_event("relaunch", 7, revision=4, changes={"training.num_gpus": 2}), "time": 1007.0},
    {"kind": "guard", "time": 4e9, "step": 7, "guard": "nonfinite", "action": "off", "reason": "why", "phase": "bf16"},
    {"kind": "warning", "time": 4e9, "step": 7, "message": "slow"},
]
END = {**make_event("end", 8), "time": 1010.0}


class Markup(HTMLParser):
    """Elements and attributes of a text, and whether every one is closed as it should be."""

    def __init__(self, text: str):
        super().__init__()
        self.tags, self.attributes = set(), set()
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        self.attributes |= {name for name, _ in attrs}


def places(value, path=()):
    """The path of every value and of every key in nested plain data."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in inner:
        yield (*path, key), False
        if isinstance(value, dict) and path:  # names of datasets, terms, settings and phases, not those of fields
            yield (*path, key), True
        yield from places(item, (*path, key))


def put(value, path, as_key: bool):
    """Nested data with the hostile text at one place."""
    value = copy.deepcopy(value)
    node = value
    for key in path[:-1]:
        node = node[key]
    if as_key:
        node[HOSTILE] = node.pop(path[-1])
    else:
        node[path[-1]] = HOSTILE
    return value


def check(panel: Panel, what: str) -> int:
    """Draw a run anew, as far as it can be drawn, click, and look at all HTML; how many texts hold the hostile one."""
    panel.history, panel._shown_for = History(panel.run.folder), None
    turns = iter((False, True))  # one redraw, at once
    panel._closing.wait = lambda interval: next(turns)
    panel._keep_up()
    with contextlib.suppress(Exception):  # a number that is none
        panel._toggles["bf16"].value = not panel._toggles["bf16"].value
    texts = [widget.value for widget in panel._widgets() if isinstance(widget, ipywidgets.HTML)]
    for text in texts:
        found = Markup(text)
        assert not {"img", "script"} & found.tags and "onerror" not in found.attributes, f"{what}: {text[:2000]}"
    return sum("&lt;img" in text for text in texts)


@pytest.fixture
def folder(tmp_path, tiny_config):
    made = runfolder.create(tiny_config(**{"training.device": "auto"}), tmp_path / "run")
    runfolder.update_manifest(made, status="running", supervisor=processes.process_identity(os.getpid()))
    return made


def write(folder, said: list[dict]) -> None:
    events.events_path(folder).write_text("".join(json.dumps(event) + "\n" for event in said))


def test_no_field_of_an_event_becomes_markup(folder):
    write(folder, EVENTS)
    panel, seen = Panel(handle.Run.attach(folder)), 0
    chosen = {event["kind"]: number for number, event in enumerate(EVENTS)}.values()  # the last of each kind
    for number in {*chosen, *(n for n, event in enumerate(EVENTS) if event["kind"] == "flip")}:
        for path, as_key in places(EVENTS[number]):
            ended = [END] if number % 2 else []
            write(folder, [*EVENTS[:number], put(EVENTS[number], path, as_key), *EVENTS[number + 1 :], *ended])
            seen += check(panel, f"{EVENTS[number]['kind']}: {'.'.join(map(str, path))}")
            assert "the panel stopped" not in panel._note.value
    for path, as_key in places(END):
        write(folder, [*EVENTS, put(END, path, as_key)])
        check(panel, f"end: {'.'.join(map(str, path))}")
    assert seen > 5, "some of it is shown as text"


def test_no_field_of_the_manifest_becomes_markup(folder):
    write(folder, EVENTS)
    manifest = json.loads((folder / runfolder.MANIFEST).read_text())
    manifest |= {"status": "failed", "cause": "rank 0 raised ValueError"}
    panel, seen = Panel(handle.Run.attach(folder)), 0
    for path, as_key in places(manifest):
        changed = put(manifest, path, as_key)
        (folder / runfolder.MANIFEST).write_text(json.dumps(changed))
        with contextlib.suppress(TypeError):
            panel.asking.hardware = hardware.Hardware(**changed["hardware"])
        seen += check(panel, f"manifest: {'.'.join(map(str, path))}")
    assert seen, "the cause is shown as text"


def test_a_run_folder_may_have_any_name_and_a_refusal_any_text(folder):
    write(folder, [*EVENTS, flip_event(5, 8, applied=False, changes={}, phases={}, reason=HOSTILE)])
    panel = Panel(handle.Run.attach(folder.rename(folder.parent / HOSTILE)))
    assert check(panel, "its name")
    assert panel.figure().png.startswith(b"\x89PNG"), "no formula either"
