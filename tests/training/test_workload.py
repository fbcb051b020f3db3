"""Which workload a config chooses, and what it is told where that is none."""

import sys

import pytest

from upsnb import overlays
from upsnb.config import RunConfig
from upsnb.errors import ConfigError
from upsnb.training import workload
from upsnb.training.fields import Fields

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
