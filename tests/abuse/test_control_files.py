"""Whatever anybody writes into control.json, training goes on as if nothing had been written."""

import json
import os
import random
import shutil

import pytest
import torch
from share import share

from upsnb.runs import runfolder
from upsnb.training import checkpoint

GOOD = {"format": 1, "revision": 7, "overlay": {"training.noise": 0.5}, "asked": {"settings": 7}, "command": "stop"}
ODD = (
    None, True, False, -1, 0, 1.5, 2**52 + 1, 10**400, "", "7", "stop", "\x00", [], {}, [[]], {"a": 1}, [7],
    float("inf"), float("nan"), "x" * 1000,
)  # fmt: skip


def odd_entries(draw):
    """A good file, but for the type of one entry."""
    key = draw.choice([*GOOD, "asked", "revision"])
    wrong = [value for value in ODD if not (key == "command" and value in ("stop", None))]
    wrong = [value for value in wrong if not (key in ("overlay", "asked") and value == {})]
    wrong = [value for value in wrong if not (key == "overlay" and isinstance(value, dict))]
    return json.dumps({**GOOD, key: draw.choice(wrong)})


def odd_asked(draw):
    asked = {draw.choice(["settings", "explode", "pause"]): draw.choice([*ODD, 8, 10**9])}
    return json.dumps({**GOOD, "asked": asked | {"": 1}})


def odd_measure(draw):
    """It asks for a measurement, but says nothing that can be measured."""
    good = {"overlay": {}, "within": 0.05, "steps": 10}
    odd = [{**good, key: value} for key in good for value in (*ODD, 0.0) if type(value) is not type(good[key])]
    said = draw.choice(
        [None, "compile", 7, [], {}, {"overlay": {}}, {**good, "within": 0.0}, {**good, "steps": 0}, *odd]
    )
    return json.dumps({**GOOD, "command": "measure", "measure": said})


def missing_entries(draw):
    gone = draw.choice(["format", "revision", "overlay"])
    return json.dumps({key: value for key, value in GOOD.items() if key != gone})


def cut(draw):
    text = json.dumps(GOOD)
    return text[: draw.randrange(len(text))]


def flipped_bytes(draw):
    data = bytearray(json.dumps(GOOD).encode())
    data[draw.randrange(len(data))] = draw.choice((0, 0x80, 0xFF))
    return bytes(data)


def deep(draw):
    depth, (before, after) = draw.choice((250, 10**5)), draw.choice((("[", "]"), ('{"a":', "}")))
    return '{"format": 1, "revision": 7, "overlay": ' + depth * before + "0" + depth * after + "}"


def large(draw):
    return json.dumps({**GOOD, "overlay": {"training.noise": "x" * draw.choice((10**5, 2 * 10**7))}})


def infinite(draw):
    return json.dumps(GOOD).replace("0.5", draw.choice(("Infinity", "-Infinity", "NaN", "1e400")))


def no_mapping(draw):
    return draw.choice(("", "[]", "{}", "null", "7", '"stop"', " \n", "\ufeff{}", "\0" * 4096, "stop"))


def folder(draw, path):
    path.mkdir()
    (path / "inside").touch()


def pipe(draw, path):
    os.mkfifo(path)


def link(draw, path):
    path.symlink_to(draw.choice(("/dev/zero", "/nowhere", path.name, "/")))


def gone(draw, path):
    pass


TEXTS = (odd_entries, odd_asked, odd_measure, missing_entries, cut, flipped_bytes, deep, large, infinite, no_mapping)
PLACES = (folder, pipe, link, gone)


def put(path, seed):
    """Put what a seed draws in the place of a file; its name."""
    draw = random.Random(seed)
    make = (TEXTS + PLACES)[seed] if seed < len(TEXTS + PLACES) else draw.choice(TEXTS * 2 + PLACES)
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)
    if make in PLACES:
        make(draw, path)
    else:
        found = make(draw)
        path.write_bytes(found if isinstance(found, bytes) else found.encode())
    return make.__name__


def weights(folder):
    return checkpoint.load(folder)["setup"]["model"]


@pytest.mark.slow
def test_no_control_file_stops_training_and_the_next_request_is_obeyed(tiny_config, tmp_path, train_here):
    seeds = list(share(100)) + [*range(len(TEXTS + PLACES))]
    config = tiny_config(("darcy",), **{"training.batch_size": 4, "stages.operator.epochs": len(seeds) // 4 + 3})
    alone = train_here(config, tmp_path / "alone")
    folder, put_there, asked = tmp_path / "run", [], []

    def at_step(step):
        if step and len(put_there) < step and seeds:
            put_there.append(put(folder / runfolder.CONTROL, seeds.pop()))
        elif not seeds and not asked:
            asked.append(runfolder.write_control(folder, None, runfolder.CHECKPOINT).revision)

    events = train_here(config, folder, at_step)
    steps = [[event["loss"] for event in told if event["kind"] == "step"] for told in (alone, events)]
    assert steps[0] == steps[1] and len(steps[0]) > len(put_there) > 10 and not seeds
    assert not [event for event in events if event["kind"] in ("flip", "paused", "relaunch")]
    assert [event["revision"] for event in events if event["kind"] == "checkpoint" if event["revision"]] == asked
    assert [event["message"] for event in events if event["kind"] == "warning"], "it is said once a time"
    assert weights(tmp_path / "alone").keys() == weights(folder).keys()
    for name, value in weights(tmp_path / "alone").items():
        assert torch.equal(value, weights(folder)[name]), name
