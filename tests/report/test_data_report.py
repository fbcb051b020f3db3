"""Figures and tables of a dataset: complete for any family, in one, two and three dimensions."""

import json

import pytest
from figure_checks import check

from upsnb import overlays
from upsnb.data import datasets
from upsnb.report import data_report
from upsnb.runs.runfolder import REPORT

OTHERS = {  # families that no other test of figures has: several channels, three dimensions
    "gas": {"family": "cfd1d", "generate": {"num_samples": 10, "resolution": 16, "num_times": 12}},
    "air": {"family": "cfd3d", "generate": {"num_samples": 10, "resolution": 8, "num_times": 11}},
}


@pytest.fixture(scope="module")
def opened(tiny_config, data_root):
    """Four datasets: a wave, a static field, three channels, five channels in space."""
    config = tiny_config()
    added = {f"data.datasets.{name}": values for name, values in OTHERS.items()}
    config = overlays.apply(config, {**added, "data.split.test_fraction": 0.2})
    datasets.generate_missing(config, data_root, lambda message: None)
    return datasets.open_all(config, data_root)


@pytest.mark.parametrize("name", ["advection", "darcy", *OTHERS])
def test_a_sample_of_every_kind_is_drawn(opened, name):
    check(data_report.samples(opened[name]))


@pytest.mark.parametrize("names", [["advection"], ["advection", "darcy"]])
def test_figures_of_few_datasets_hold_their_titles(opened, names):
    few = {name: opened[name] for name in names}
    check(data_report.spectra(few)), check(data_report.values(few))


def test_spectra_and_values_have_a_panel_for_each(opened):
    spectra, values = data_report.spectra(opened), data_report.values(opened)
    check(spectra), check(values)
    assert len(spectra.axes) == 4
    assert len(values.axes) == sum(dataset.spec.output_channels for dataset in opened.values())


def test_a_report_says_what_its_summary_and_tables_say(opened, tmp_path):
    report, audits = data_report.report(opened, tmp_path)
    assert json.loads((tmp_path / REPORT).read_text())["datasets"].keys() == report["datasets"].keys() == opened.keys()
    assert list(data_report.table(audits).index) == list(opened)
    told = data_report.summary(report)
    assert all(f"{name}: a look-up scores" in told for name in opened)
    assert all(text in told for text in data_report.findings(audits)["found"])
