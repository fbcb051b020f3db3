"""Figures: labelled, robust against what runs really produce, and without side effects."""

import subprocess
import sys
from functools import cache

import matplotlib
import numpy as np
import pytest
from figure_checks import bare_axes, drawn, outside, stray_swatches
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from upsnb.data.families import FAMILIES
from upsnb.report import plots, style

WAVES, DARCY = FAMILIES["advection1d"], FAMILIES["darcy2d"]
RANDOM = np.random.default_rng(0)
X, TIMES = (np.arange(24) + 0.5) / 24, np.linspace(0, 2, 7)
TRUTH = np.sin(2 * np.pi * (X - 0.4 * TIMES[:, None]))
FIELD = RANDOM.random((12, 10))
STEPS = np.arange(50)
NAMES = ["waves", "darcy"] * 25
GAPPED = np.where(np.arange(50) % 4, np.nan, 0.5)


def sample(truth=FIELD, prediction=FIELD + 0.1, inputs=FIELD, nrmse=0.1, label="median"):
    return plots.FieldSample(label, inputs, truth, prediction, nrmse)


def with_nan(values):
    values = np.array(values, dtype=float)
    values.flat[1] = np.nan
    values.flat[-1] = np.inf
    return values


CASES = {
    "1d": lambda: plots.prediction_truth_error_1d(WAVES, X, TRUTH, 0.9 * TRUTH, TIMES, title="one"),
    "1d constant": lambda: plots.prediction_truth_error_1d(WAVES, X, 0 * TRUTH, 0 * TRUTH, TIMES),
    "1d gaps": lambda: plots.prediction_truth_error_1d(WAVES, X, TRUTH, with_nan(TRUTH), TIMES),
    "1d nothing finite": lambda: plots.prediction_truth_error_1d(WAVES, X, TRUTH, np.nan * TRUTH, TIMES),
    "1d diverged": lambda: plots.prediction_truth_error_1d(WAVES, X, TRUTH, 1e30 * TRUTH, TIMES),
    "1d one frame": lambda: plots.prediction_truth_error_1d(WAVES, X, TRUTH[:1], TRUTH[:1], TIMES[:1]),
    "1d one point": lambda: plots.prediction_truth_error_1d(WAVES, X[:1], TRUTH[:, :1], TRUTH[:, :1], TIMES),
    "1d float32": lambda: plots.prediction_truth_error_1d(WAVES, *(a.astype("f4") for a in (X, TRUTH, TRUTH, TIMES))),
    "2d": lambda: plots.prediction_truth_error_2d(DARCY, [sample(), sample(label="worst")], title="two"),
    "2d one sample": lambda: plots.prediction_truth_error_2d(DARCY, [sample()]),
    "2d constant": lambda: plots.prediction_truth_error_2d(DARCY, [sample(0 * FIELD, 0 * FIELD, 0 * FIELD + 1)]),
    "2d gaps": lambda: plots.prediction_truth_error_2d(DARCY, [sample(with_nan(FIELD), nrmse=float("nan"))]),
    "rollout": lambda: plots.rollout_error(
        TIMES,
        {"model": TIMES + 0.1, "persistence": TIMES + 1},
        quartiles={"model": [TIMES + 0.05, TIMES + 0.2]},
        given_until=-0.1,
        lost_at=0.4,
    ),
    "correlations": lambda: plots.correlations(TIMES, {"operator": np.cos(TIMES), "crps": 1 - TIMES / 9}, title="lost"),
    "correlations gaps": lambda: plots.correlations(TIMES, {"operator": with_nan(TIMES)}),
    "calibration": lambda: plots.calibration(TIMES, TIMES + 0.1, TIMES + 0.2, [0.3, 0.2, 0.2, 0.3], title="wide"),
    "calibration one frame": lambda: plots.calibration([0], [0.1], [0.2], [0.5, 0.5]),
    "calibration collapsed": lambda: plots.calibration(TIMES, 0 * TIMES, TIMES, [1.0, 0.0]),
    "cost": lambda: plots.cost({"operator": 1.0, "crps": 19.0}, {"operator": 0.2, "crps": 0.1}, "CRPS [-]", title="up"),
    "cost gaps": lambda: plots.cost({"operator": 1.0, "crps": 19.0}, {"operator": np.nan, "crps": 0.1}, "CRPS [-]"),
    "members 1d": lambda: plots.members_1d(
        WAVES, X, TIMES, TRUTH, TRUTH + RANDOM.normal(0, 0.1, (9, *TRUTH.shape)), title="x"
    ),
    "members 1d equal": lambda: plots.members_1d(WAVES, X, TIMES, TRUTH, np.stack([TRUTH, TRUTH])),
    "members 1d gaps": lambda: plots.members_1d(WAVES, X, TIMES, TRUTH, np.stack([TRUTH, with_nan(TRUTH)])),
    "members 2d": lambda: plots.members_2d(DARCY, FIELD, FIELD + RANDOM.normal(0, 0.1, (9, *FIELD.shape)), title="two"),
    "rollout one sample": lambda: plots.rollout_error(TIMES, {"model": TIMES}, quartiles={"model": [TIMES, TIMES]}),
    "rollout one frame": lambda: plots.rollout_error([1.0], {"model": [0.1]}, given_until=0.5),
    "rollout gaps": lambda: plots.rollout_error(
        TIMES, {"model": with_nan(TIMES)}, quartiles={"model": [with_nan(TIMES), with_nan(TIMES)]}
    ),
    "rollout constant": lambda: plots.rollout_error(TIMES, {"model": np.full(7, 0.5)}),
    "rollout nothing finite": lambda: plots.rollout_error(TIMES, {"model": np.full(7, np.nan)}),
    "spectra": lambda: plots.spectra(np.arange(9), {"truth": 1 / (1 + np.arange(9)), "model": np.zeros(9)}),
    "spectra nothing finite": lambda: plots.spectra(np.arange(9), {"truth": np.full(9, np.nan)}),
    "loss": lambda: plots.loss_terms(
        STEPS,
        {("waves", "total"): 1 / (1 + STEPS), ("waves", "inverse"): GAPPED, ("darcy", "total"): 0.1 + 0 * STEPS},
        {},
        title="Training loss, from the first tenth of the steps to the last: waves 0.5 to 0.02, darcy 0.1 to 0.1",
    ),
    "loss one step": lambda: plots.loss_terms([0], {("all", "total"): [1.0]}, validation={"burgers": ([0], [0.5])}),
    "loss validation": lambda: plots.loss_terms(
        STEPS,
        {("darcy", "total"): GAPPED},
        validation={"darcy": ([0, 20, 40], [0.9, 0.8, np.nan]), "waves": ([0, 20, 40], [0.83, 0.82, 0.81])},
    ),
    "loss flat": lambda: plots.loss_terms(STEPS, {("darcy", "total"): 0.0203 + 1e-6 * STEPS}, {}),
    "throughput": lambda: plots.throughput(
        STEPS, 50 + STEPS % 3, STEPS > 9, NAMES, [(10, 20, 50.5), (20, 30, 51.5)], 51.0, (50.5, 51.5)
    ),
    "throughput one step": lambda: plots.throughput([0.1], [9.0], [True], ["all"], [(0, 0.1, 9)], 9.0, (9.0, 9.0)),
    "throughput one window": lambda: plots.throughput(
        STEPS, 50 + STEPS, STEPS > 9, NAMES, [(10, 50, 75.0)], 75.0, (np.nan, np.nan)
    ),
    "throughput none steady": lambda: plots.throughput(
        STEPS, 50 + STEPS, STEPS < 0, NAMES, [], np.nan, (np.nan, np.nan)
    ),
    "distribution": lambda: plots.error_distribution(
        {"burgers": RANDOM.random(20), "darcy": with_nan(RANDOM.random(20))},
        baselines={"burgers": ("persistence", 0.9), "darcy": ("training mean", np.inf)},
    ),
    "distribution long names": lambda: plots.error_distribution(
        {f"2D diffusion-reaction, every second point, split {i}": [0.1, 0.2] for i in range(3)}
    ),
    "loss long names": lambda: plots.loss_terms(
        STEPS,
        {("all", f"inverse consistency of the encoder {i}"): 1 / (1 + STEPS) for i in range(4)},
        validation={f"1D compressible Navier-Stokes {i}": ([0, 40], [0.9, 0.1]) for i in range(3)},
    ),
    "distribution one sample": lambda: plots.error_distribution({"burgers": [0.1]}),
    "distribution constant": lambda: plots.error_distribution({"burgers": np.full(5, 0.1)}),
    "distribution nothing finite": lambda: plots.error_distribution({"burgers": np.full(5, np.nan)}),
}


@cache
def draw(case):
    return drawn(CASES[case]())


@pytest.mark.parametrize("case", CASES)
def test_every_axis_with_numbers_has_a_quantity_and_a_unit(case):
    axes = [child for ax in draw(case).axes for child in (ax, *ax.child_axes)]
    for ax in axes:
        for axis in (ax.xaxis, ax.yaxis):
            numbers = [tick for tick in axis.get_ticklabels() if tick.get_visible() and tick.get_text()]
            text = axis.get_label().get_text()
            assert not numbers or ("[" in text and text.endswith("]")), (ax.get_title(), text)


@pytest.mark.parametrize("case", CASES)
def test_every_text_is_inside_the_figure_and_axes_keep_their_room(case):
    figure = draw(case)
    assert not outside(figure)
    for ax in figure.axes:
        assert ax.get_window_extent(figure.canvas.get_renderer()).width > 0.12 * figure.bbox.width, case


@pytest.mark.parametrize("case", [case for case in CASES if case != "distribution nothing finite"])  # no curve to name
def test_every_swatch_of_a_legend_looks_like_something_that_is_drawn(case):
    assert not stray_swatches(draw(case))


@pytest.mark.parametrize("case", CASES)
def test_every_logarithmic_axis_has_three_numbers(case):
    assert not bare_axes(draw(case))


@pytest.mark.parametrize("share", [1.02, 1.5, 8.3, 9.8, 10.2, 95, 300, 2e4])
@pytest.mark.parametrize("low", [1.05, 2.01, 3.3, 5.05, 9.9])
def test_a_logarithmic_axis_has_three_numbers_wherever_it_begins(low, share):
    @style.styled
    def empty():
        figure = style.empty_figure(4.8, 2.8, "an axis")
        figure.subplots().set(xscale="log", xlim=(low, share * low))
        return figure

    assert not bare_axes(drawn(empty()))


@pytest.mark.parametrize("case", ["rollout", "spectra", "loss", "loss validation", "throughput", "distribution"])
def test_every_curve_has_a_name(case):
    figure = draw(case)
    for ax in figure.axes:
        named = {line.get_color() for line in ax.lines if not line.get_label().startswith("_")}
        assert {line.get_color() for line in ax.lines} <= named | set(style.PALETTE)
        legend = {text.get_text() for text in ax.get_legend().get_texts()}
        assert {line.get_label() for line in ax.lines if not line.get_label().startswith("_")} <= legend


def test_truth_and_prediction_share_the_colours_of_the_truth():
    figure = plots.prediction_truth_error_1d(WAVES, X, TRUTH, 5 * TRUTH, TIMES)
    truth, prediction, error = (ax.images[0] for ax in figure.axes[:3])
    assert truth.get_clim() == prediction.get_clim() == (TRUTH.min(), TRUTH.max())
    assert error.get_clim() == (-4 * abs(TRUTH).max(), 4 * abs(TRUTH).max())
    rows = plots.prediction_truth_error_2d(DARCY, [sample(), sample(truth=10 * FIELD)]).axes
    assert rows[1].images[0].get_clim() == rows[2].images[0].get_clim()
    assert rows[5].images[0].get_clim() == rows[6].images[0].get_clim() != rows[1].images[0].get_clim()


def test_images_put_cells_where_their_coordinates_are():
    figure = plots.prediction_truth_error_1d(WAVES, X, TRUTH, TRUTH, TIMES)
    image = figure.axes[0].images[0]
    assert image.origin == "lower"
    assert image.get_extent() == pytest.approx([0, 1, -1 / 6, 2 + 1 / 6])


def test_samples_that_are_not_finite_stay_in_the_distribution():
    figure = plots.error_distribution({"burgers": [0.1, 0.2, np.nan, np.inf]})
    line = figure.axes[0].lines[0]
    assert line.get_ydata()[-1] == 0.5
    assert line.get_label() == "burgers (n = 4, 2 not finite)"


def test_running_median_follows_and_ignores_spikes():
    values = np.ones(200)
    values[100] = 1e6
    assert style.running_median(values).tolist() == [1.0] * 200
    assert style.running_median(np.array([3.0])).tolist() == [3.0]


def test_many_curves_never_look_alike():
    looks = style.looks([f"run {i}" for i in range(18)] + ["truth", "persistence"])
    assert len({(look["color"], look["linestyle"]) for look in looks.values() if "linestyle" in look}) == 19


def test_the_callers_settings_are_left_alone():
    with matplotlib.rc_context({"font.size": 13.0, "axes.grid": False}):  # nothing that a leak could have left before
        before = dict(matplotlib.rcParams)
        figure = CASES["loss validation"]()
        figure._repr_png_()
        FigureCanvasAgg(figure).draw()
        assert dict(matplotlib.rcParams) == before


def test_saved_file_is_a_png_at_150_dpi_and_the_same_every_time(tmp_path):
    first = style.save(CASES["spectra"](), tmp_path / "new" / "figures", "spectra")
    second = style.save(CASES["spectra"](), tmp_path, "again")
    assert first == tmp_path / "new" / "figures" / "spectra.png"
    assert first.read_bytes() == second.read_bytes()
    width = int.from_bytes(first.read_bytes()[16:20], "big")
    assert width == pytest.approx(4.8 * 150, abs=1)


def test_notebooks_can_show_a_figure_without_pyplot():
    figure = CASES["spectra"]()
    assert isinstance(figure, Figure)
    assert figure._repr_png_()[0].startswith(b"\x89PNG")


def test_what_is_shown_is_what_is_saved_and_smaller_than_it_is_sharp(tmp_path):
    figure = CASES["spectra"]()
    shown, size = figure._repr_png_()
    assert style.save(figure, tmp_path, "spectra").read_bytes() == shown
    assert int.from_bytes(shown[16:20], "big") / size["width"] == pytest.approx(150 / 110, rel=0.01)


def test_pyplot_and_torch_are_never_imported(tmp_path):
    code = (
        "import sys; from upsnb.report import plots, style\n"
        f"style.save(plots.spectra([0, 1, 2], {{'truth': [1, 1, 1]}}), {str(tmp_path)!r}, 'a')\n"
        "assert not {'matplotlib.pyplot', 'torch'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_rounding_error_far_below_the_largest_energy_does_not_squeeze_the_spectrum():
    wavenumber = np.arange(65)
    truth = 10.0 ** (-wavenumber / 2)  # down to 1e-32
    bottom, top = plots.spectra(wavenumber, {"truth": truth, "error": truth / 100}).axes[0].get_ylim()
    assert 1e-9 * truth[1] < bottom < 1e-6 * truth[1] and truth[1] < top < 10 * truth[1]


def test_a_data_set_has_one_colour_in_training_and_validation():
    top, bottom = CASES["loss validation"]().axes
    colours = [{line.get_label().split(",")[0]: line.get_color() for line in ax.lines[-2:]} for ax in (top, bottom)]
    assert colours[0]["darcy"] == colours[1]["darcy"] != colours[1]["waves"]


def test_every_validation_is_a_point():
    line = CASES["loss validation"]().axes[1].lines[1]
    assert line.get_marker() == "o" and list(line.get_ydata()) == [0.83, 0.82, 0.81]


def test_steps_of_each_data_set_have_a_colour_and_windows_stand_where_they_were():
    (ax,) = CASES["throughput"]().axes
    names = {line.get_label(): line for line in ax.lines}
    assert names["steps of waves"].get_color() != names["steps of darcy"].get_color()
    assert sum(len(names[f"steps of {name}"].get_xdata()) for name in ("waves", "darcy")) == (STEPS > 9).sum()
    (windows,) = (line for name, line in names.items() if name.startswith("windows"))
    assert (
        windows.get_xdata()[[0, 1, 3, 4]].tolist() == [10, 20, 20, 30] and np.isnan(windows.get_xdata()[[2, 5]]).all()
    )
    assert windows.get_ydata()[[0, 1, 3, 4]].tolist() == [50.5, 50.5, 51.5, 51.5]


def test_a_data_set_has_the_colour_of_the_loss_figure_whichever_step_was_steady_first():
    names, steady = ["waves", "darcy", "waves", "darcy"], [False, True, True, True]
    figure = plots.throughput([1, 2, 3, 4], [9, 5, 9, 5], steady, names, [], np.nan, (np.nan, np.nan))
    drawn = {line.get_label(): line.get_color() for line in figure.axes[0].lines}
    losses = plots.loss_terms([1, 2], {(name, "relative"): [1.0, 0.5] for name in ("waves", "darcy")}, {}).axes[0]
    labelled = {line.get_label(): line.get_color() for line in losses.lines}
    for name in ("waves", "darcy"):
        assert drawn[f"steps of {name}"] == labelled[f"{name}, relative"]
