"""Which workload a config chooses, and what it is told where that is none."""

import json
import sys
from types import SimpleNamespace

import pytest

from upsnb import overlays
from upsnb.config import RunConfig
from upsnb.errors import ConfigError
from upsnb.runs import runfolder
from upsnb.training import workload
from upsnb.training.fields import Fields
from upsnb.training.workload import Workload
from upsnb.values import PositiveInt, Section

WRITTEN = """
from upsnb.training.fields import Fields

class Renamed(Fields):
    unit, metric = "pictures", "1 - accuracy"

class Other: ...
"""


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A project's folder with a workload in `mine/own.py`."""
    for folder in ("params", "notebooks", "mine"):
        (tmp_path / folder).mkdir()
    (tmp_path / "mine/own.py").write_text(WRITTEN)
    monkeypatch.chdir(tmp_path / "notebooks")
    monkeypatch.setattr(sys, "path", [*sys.path])
    return tmp_path


def chosen(name: str) -> RunConfig:
    return overlays.resolve({"workload": name, "data.datasets": {}})


def test_fields_are_what_a_run_is_about_where_nobody_says_otherwise():
    made = workload.of(RunConfig())
    assert type(made) is Fields and (made.unit, made.metric) == ("samples", "nRMSE")


def test_a_file_below_the_projects_folder_is_found_from_anywhere_in_it(project):
    made = workload.of(chosen("mine/own.py:Renamed"))
    assert (made.unit, made.metric, made.units_per_pair()) == ("pictures", "1 - accuracy", 1)
    assert type(made) is type(workload.of(chosen("mine.own:Renamed"))), "loader processes import it by this name"


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("mine/none.py:Renamed", "No module named 'mine.none'"),
        ("mine/own.py:Nobody", "has no attribute 'Nobody'"),
        ("mine/own.py:Other", "is no Workload class"),
        ("upsnb.config:RunConfig", "is no Workload class"),
        ("", "cannot be imported"),
    ],
)
def test_what_is_no_workload_is_refused_in_words(project, name, said):
    with pytest.raises(ConfigError, match="data.workload") as refused:
        workload.of(chosen(name))
    assert said in str(refused.value)


def test_a_workload_and_fields_exclude_each_other():
    with pytest.raises(ConfigError, match="brings its own -> set data.datasets to {}"):
        overlays.resolve({"workload": "mine/own.py:Renamed"})
    with pytest.raises(ConfigError, match="name at least one dataset"):
        overlays.resolve({"data.datasets": {}})


class Own(Section):
    size: PositiveInt = 3
    colour: str = "red"


def made(settings: dict) -> Workload:
    """Of a class that has no fields to write down what they are judged by."""
    config = overlays.resolve({"workload": "mine/own.py:Own", "data.datasets": {}, "workload_settings": settings})
    written = {name: lambda self: None for name in Workload.__abstractmethods__}
    return type("Made", (Workload,), written)(config)


def test_settings_of_its_own_are_checked_and_every_wrong_one_is_named():
    assert made({"size": 7}).section(Own, "data.workload_settings") == Own(size=7)
    with pytest.raises(ConfigError, match="the settings are size, colour") as refused:
        made({"size": 0, "sise": 1}).section(Own, "data.workload_settings")
    assert all(f"data.workload_settings.{name}" in str(refused.value) for name in ("size", "sise"))


def test_runs_agree_in_what_they_are_judged_by_only_where_data_and_settings_agree(tmp_path):
    def judged(settings: dict, about: dict) -> dict:
        data = {"text": SimpleNamespace(about=about)}
        made(settings).write(tmp_path, {"text": {"error": 0.5}}, data, "test", "last")
        return json.loads((tmp_path / runfolder.EVALUATION).read_text())["datasets"]["text"]["test"]["protocol"]

    one = judged({"size": 7}, {"files": ["a.npy"]})
    assert one == judged({"size": 7}, {"files": ["a.npy"]})
    assert one != judged({"size": 8}, {"files": ["a.npy"]}) and one != judged({"size": 7}, {"files": ["b.npy"]})
    assert all(isinstance(value, str | int) for value in one.values())
