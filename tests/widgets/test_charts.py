"""Following a run and drawing it: what is kept when points are thinned, what a flip's label says, what it costs."""

import json
import re
import sys
from xml.etree import ElementTree

import numpy as np
import pytest
from made_runs import make_event

from upsnb.runs import events
from upsnb.widgets import charts, html, snapshot
from upsnb.widgets.history import MOST_BUCKETS, History, Table, letter

START = {"kind": "start", "time": 1000.0, "step": 0, "num_ranks": 2, "device": "cpu", "total_steps": 1000}
START |= {"parameters": 1000, "samples_per_step": 16, "datasets": {"waves": {"pairs": 100}}}


def step_event(step: int, **changes) -> dict:
    event = {"kind": "step", "time": 1000.0 + step, "step": step, "time_s": 0.5 * step, "step_time_ms": 500.0}
    event |= {"samples_per_s": 32.0, "data_wait_ms": 5.0, "loss": 1 / step, "losses": {"relative": 1 / step}}
    return {
        **event,
        "peak_memory_gib": 2.0,
        "steady": step > 5,
        "epoch": 0,
        "datasets": ["waves"],
        "learning_rate": 1e-3,
        **changes,
    }


def flip_event(revision: int, step: int, **changes) -> dict:
    event = {"kind": "flip", "time": 1000.0 + step, "step": step, "revision": revision, "applied": True}
    event |= {"reason": None, "changes": {"training.amp": True}, "phases": {"bf16": True}, "phases_on": ["bf16"]}
    return {**event, "duration_ms": 3.0, **changes}


def effect_event(revision: int, step: int, **changes) -> dict:
    event = {"kind": "flip_effect", "time": 1000.0 + step, "step": step, "revision": revision, "ratio": 1.31}
    return {**event, "ci95": [1.27, 1.35], "memory_gib": [2.0, 1.58], **changes}


def say(folder, *said: dict) -> None:
    with open(events.events_path(folder), "a") as file:
        file.writelines(json.dumps(event) + "\n" for event in said)


def history(folder, *said: dict) -> History:
    say(folder, START, *said)
    result = History(folder)
    result.read()
    return result


# -- thinning ------------------------------------------------------------------------------------------------------


def test_thinning_keeps_every_extreme_within_600_points():
    values = np.random.default_rng(0).normal(size=100_000)
    values[[7, 54_321, 99_999]] = 50, -50, 60
    table = Table(("loss",))
    table.append({"loss": values})
    least, greatest, mean = table.thinned("loss")
    assert len(least) + len(greatest) <= 2 * MOST_BUCKETS == 600
    assert least.min() == -50 and greatest.max() == 60 and greatest[0] == 50
    assert mean.mean() == pytest.approx(values.mean(), abs=0.01)


def test_thinning_bit_by_bit_equals_thinning_at_once():
    generator = np.random.default_rng(1)
    values = generator.normal(size=5000)
    values[generator.integers(0, 5000, 500)] = np.nan
    values[1000:1100] = np.nan  # a whole bucket of gaps
    grown = Table(("loss",))
    while grown.num_rows < 5000:
        grown.append({"loss": values[grown.num_rows : grown.num_rows + generator.integers(1, 90)]})
        at_once = Table(("loss",))
        at_once.append({"loss": values[: grown.num_rows]})
        for mine, expected in zip(grown.thinned("loss", 3), at_once.thinned("loss", 3)):
            np.testing.assert_allclose(mine, expected)


def test_steps_that_a_relaunch_repeats_replace_the_earlier_ones(tmp_path):
    followed = history(tmp_path, *(step_event(k, loss=9.0) for k in range(1, 401)))
    assert followed.steps.thinned("loss")[2][-1] == 9
    say(tmp_path, {**START, "step": 350}, *(step_event(k, loss=1.0) for k in range(351, 361)))
    followed.read()
    np.testing.assert_array_equal(followed.steps["step"], np.arange(1, 361))
    assert list(followed.steps["loss"][348:352]) == [9, 9, 1, 1]
    assert followed.steps.thinned("loss")[2][-1] == 1 and followed.step == 360
    again = History(tmp_path)  # one read of everything finds the same
    again.read()
    np.testing.assert_array_equal(again.steps["loss"], followed.steps["loss"])


def test_a_long_run_is_parsed_once_and_redrawn_from_what_is_new(tmp_path, monkeypatch):
    parsed, loads = [], json.loads
    monkeypatch.setattr(json, "loads", lambda text: (parsed.append(len(text)), loads(text))[1])
    say(tmp_path, START, *(step_event(k) for k in range(1, 20_001)))
    size = events.events_path(tmp_path).stat().st_size
    followed = History(tmp_path)
    followed.read()
    charts.svg(followed)
    assert len(parsed) == 1 and parsed[0] > 0.99 * size
    followed.steps["loss"][:19_900] = -1e9  # in complete buckets, which nobody looks into again
    say(tmp_path, step_event(20_001))
    assert [event["step"] for event in followed.read()] == [20_001]
    assert len(parsed) == 2 and parsed[1] < 1000
    least = followed.steps.thinned("loss")[0]
    assert len(least) <= MOST_BUCKETS and least.min() > 0
    assert charts.svg(followed)


# -- curves ----------------------------------------------------------------------------------------------------------


def long_history(folder, **fields) -> History:
    """600 points a curve, noise on every one, three terms and a GPU."""
    noise = np.random.default_rng(2).uniform(0.5, 2, (1200, 5))
    steps = []
    for k, (a, b, c, d, e) in enumerate(noise.tolist(), 1):
        terms = {"relative": a / k, "spectral": b / k, "inv_enc": c / k}
        telemetry = {name: [100 * d] for name in ("utilisation_percent", "power_w", "clock_mhz")}
        steps.append(step_event(k, samples_per_s=32 * a, loss=b, losses=terms, data_wait_ms=20 * e, **fields))
        steps.append({"kind": "telemetry", "time": 1000.0 + k, "step": k, **telemetry})
    flips = [event for r in range(1, 13) for event in (flip_event(r, 90 * r), effect_event(r, 90 * r + 40))]
    return history(folder, *steps, *flips)


@pytest.mark.parametrize("axis", ["step", "time"])
@pytest.mark.parametrize("terms", [False, True])
def test_a_redraw_is_whole_html_of_at_most_35_kilobytes(tmp_path, axis, terms):
    text = charts.svg(long_history(tmp_path), axis, terms)
    assert len(text.encode()) <= 35_000
    ElementTree.fromstring(text)  # every tag is closed, every attribute quoted
    assert "nan" not in text and "inf" not in text and text.count("<svg") == 8


def test_every_loss_term_is_a_curve_however_many_there_are(tmp_path):
    names = [f"term {number:02}" for number in range(15)]
    followed = history(tmp_path, *(step_event(k, losses=dict.fromkeys(names, 1.0)) for k in range(1, 11)))
    assert [curve.name for curve in charts.strips(followed, terms=True)[1].curves] == names


def test_validation_errors_and_the_learning_rate_are_curves(tmp_path):
    evaluated = {**make_event("eval", 50, time_s=25.0, val_nrmse={"waves": 0.5, "a&b": None}), "time": 1050.0}
    steps = [step_event(k, learning_rate=1e-3 * k) for k in range(1, 101)]
    later = {**evaluated, "step": 80, "val_nrmse": {"waves": 0.25, "a&b": 0.1}, "best": False}
    followed = history(tmp_path, *steps, evaluated, later)
    (errors,) = [strip for strip in charts.strips(followed) if strip.title == "validation nRMSE"]
    assert list(errors.x) == [50, 80] and list(charts.strips(followed, "time")[2].x) == [25, 40]
    assert {curve.name: curve.y.tolist()[1] for curve in errors.curves} == {"a&b": 0.1, "waves": 0.25}
    (rate,) = [strip for strip in charts.strips(followed) if strip.title == "learning rate"]
    assert rate.curves[0].y[-1] == pytest.approx(0.1) and "a&amp;b" in charts.svg(followed)
    assert followed.best_step == 50


def test_the_pointer_finds_every_curves_value_at_its_place(tmp_path):
    text = charts.svg(history(tmp_path, *(step_event(k, loss=float(k)) for k in range(1, 101))))
    said = re.findall(r'<i data-v="([^"]*)"', text)
    assert len(said) == charts.COLUMNS
    for shown in said:
        step, *values = shown.split("&#10;")
        loss = next(value for value in values if value.startswith("loss "))
        assert abs(float(loss.removeprefix("loss ")) - float(step.removeprefix("step "))) <= 1.5
        assert "2 GiB" in values and "learning rate 0.001" in values


def test_who_flips_too_early_is_told_what_a_measurement_needs(tmp_path):
    followed = history(tmp_path, *(step_event(k) for k in range(1, 11)))
    assert f"5 of {charts.COMPARABLE} steady steps" in charts.svg(followed)
    say(tmp_path, *(step_event(k) for k in range(11, 31)))
    followed.read()
    assert "steady steps" not in charts.svg(followed)
    say(tmp_path, flip_event(1, 30))
    followed.read()
    assert f"0 of {charts.COMPARABLE} steady steps" in charts.svg(followed), "anew after each change"


def test_a_label_that_is_wider_than_a_narrow_page_says_less(tmp_path):
    many = dict.fromkeys(("activation_checkpointing", "loss_frequency", "optimizer_offload"), True)
    steps = [step_event(k) for k in range(1, 101)]
    text = charts.svg(history(tmp_path, *steps, flip_event(1, 50, phases=many), effect_event(1, 90)))
    (said,) = re.findall(r"<u [^>]*>([^<]*)</u>", text)
    assert said == "A  ×1.31 [1.27, 1.35], memory −21 %" and "optimizer offload" in text, "the pointer finds the rest"


def test_flips_have_letters():
    assert [letter(index) for index in (0, 25, 26, 27, 52, 701, 702)] == ["A", "Z", "AA", "AB", "BA", "ZZ", "AAA"]


def test_warm_up_and_compile_steps_are_pale_and_left_out_of_the_figure(tmp_path):
    unsteady = {k: {"samples_per_s": 1e6, "steady": False} for k in (1, 2, 50)}
    followed = history(tmp_path, *(step_event(k, **unsteady.get(k, {"steady": True})) for k in range(1, 101)))
    throughput = charts.strips(followed)[0]
    pale, counted = throughput.curves
    assert pale.pale and np.flatnonzero(np.isfinite(pale.y)).tolist() == [0, 1, 49]
    assert np.nanmax(counted.y) == 32 and throughput.span()[1] < 40 and followed.rate() == 32
    assert 'class="pale"' in charts.svg(followed)


def test_throughput_is_samples_over_seconds_where_datasets_take_turns(tmp_path):
    """Steps of 1 s at 10 samples/s and of 0.1 s at 100: 20 samples in 1.1 s, not 55 samples/s."""
    say(tmp_path, {**START, "datasets": {"a": {"pairs": 9}, "b": {"pairs": 9}}})
    fast = {"samples_per_s": 100.0, "step_time_ms": 100.0}
    slow = {"samples_per_s": 10.0, "step_time_ms": 1000.0}
    say(tmp_path, *(step_event(k, steady=True, **(fast if k % 2 else slow)) for k in range(1, 101)))
    followed = History(tmp_path)
    followed.read()
    curve = charts.strips(followed)[0].curves[1]
    np.testing.assert_allclose(curve.y, 20 / 1.1)
    assert followed.rate() == pytest.approx(20 / 1.1)
    assert set(curve.low) == {10} and set(curve.high) == {100}


def test_a_loss_that_is_not_finite_is_a_gap_and_is_said(tmp_path):
    followed = history(tmp_path, *(step_event(k, loss=None if k > 50 else 1.0) for k in range(1, 101)))
    assert np.isnan(charts.strips(followed)[1].curves[0].y[50:]).all()
    assert "not finite" in charts.svg(followed)


def test_a_run_without_steps_says_what_it_is_doing(tmp_path):
    said = {"kind": "progress", "time": 1000.0, "step": 0, "message": "generating <waves>"}
    assert "generating &lt;waves&gt;" in charts.svg(history(tmp_path, said))


# -- flips -----------------------------------------------------------------------------------------------------------


def test_a_flip_is_labelled_with_its_measured_effect_and_interval(tmp_path):
    steps = [step_event(k) for k in range(1, 200)]
    followed = history(tmp_path, *steps, flip_event(1, 100), effect_event(1, 140))
    text = "bf16  ×1.31 [1.27, 1.35], memory −21 %"
    assert f"A  {text}" in charts.svg(followed), "a letter, because numbers are phases"
    assert "×1.31 [1.27, 1.35], memory −21 %" in html.flips(followed, {"bf16": 1.1})
    assert "×1.10" in html.flips(followed, {"bf16": 1.1})


@pytest.mark.parametrize("steps", [range(10, 1000, 80), [500] * 9, [995, 996, 997, 998, 999], [1, 2, 3]])
def test_labels_overlap_nowhere_and_end_inside_the_narrowest_strip(tmp_path, steps):
    flips = [event for r, k in enumerate(steps, 1) for event in (flip_event(r, k), effect_event(r, k))]
    text = charts.svg(history(tmp_path, *(step_event(k) for k in range(1, 1001)), *flips))
    found = re.findall(r'<u style="top:(\d+)px;left:max\(0px,min\(([\d.]+)%,calc\(100% - (\d+)px', text)
    assert len(found) >= min(len(steps), charts.LANES)
    boxes = []
    for top, share, pixels in found:
        left = max(0, min(charts.NARROWEST * float(share) / 100, charts.NARROWEST - int(pixels)))
        assert left + int(pixels) <= charts.NARROWEST + 1
        boxes.append((top, left, left + int(pixels)))
    for i, (top, left, right) in enumerate(boxes):
        assert not any(top == t and left < r and right > a for t, a, r in boxes[:i])


@pytest.mark.parametrize("axis", ["step", "time"])
def test_numbers_below_the_narrowest_strip_stand_apart(axis):
    for end in np.geomspace(3, 3e6, 500).round():
        *marks, last = re.findall(r"<s style=\"(?:.*?left:([\d.]+)%|right:0)\">(.+?)</s>", charts._axis(end, axis))
        places = [(charts.NARROWEST * float(share) / 100, charts.LETTER * len(mark) / 2) for share, mark in marks[1:]]
        edges = [charts.LETTER * len(marks[0][1]), *(side for x, half in places for side in (x - half, x + half))]
        edges.append(charts.NARROWEST - charts.LETTER * len(last[1]))
        assert edges == sorted(edges), (end, marks, last)


def test_refused_flips_say_why_and_no_text_of_a_run_becomes_markup(tmp_path):
    bad = flip_event(1, 50, applied=False, changes={}, phases={}, reason="rank 0: 1 problem\n  <script>x</script>")
    followed = history(tmp_path, *(step_event(k) for k in range(1, 101)), bad)
    for text in (charts.svg(followed), html.flips(followed, {})):
        ElementTree.fromstring(text)
        assert "<script>" not in text and "&lt;script&gt;" in text


def test_a_request_is_answered_by_its_own_flip_or_a_later_one(tmp_path):
    followed = history(tmp_path, step_event(1), flip_event(3, 7, changes={}, phases={}))
    assert followed.answer(4, "bf16") == "bf16: requested"
    say(tmp_path, flip_event(6, 9), flip_event(7, 12, applied=False, reason="rank 0: 1 problem\n  no ranks"))
    followed.read()
    assert followed.answer(2, "bf16") == "bf16: applied at step 7, and nothing had to change"
    assert followed.answer(4, "bf16") == "bf16: applied at step 9"
    assert followed.answer(7, "fsdp2") == "fsdp2: refused. no ranks"


def test_a_cold_flip_is_relaunching_until_it_is_answered(tmp_path):
    followed = history(tmp_path, step_event(1), {**make_event("relaunch", 1), "time": 1002.0})
    said = [followed.answer(1, "FSDP2 on")]
    for event in ({**START, "step": 1}, step_event(2), flip_event(1, 2, cold=True, phases={"fsdp2": True})):
        say(tmp_path, event)
        followed.read()
        said.append(followed.answer(1, "FSDP2 on"))
    assert said == ["FSDP2 on: relaunching from a checkpoint"] * 3 + ["FSDP2 on: applied at step 2"]
    assert not followed.relaunching and followed.flips[0].what == "FSDP2"


def test_what_was_left_out_of_a_flip_is_listed_with_its_reason(tmp_path):
    skipped = flip_event(1, 5, changes={}, phases={}, skipped={"fused": "needs <CUDA>"})
    followed = history(tmp_path, *(step_event(k) for k in range(1, 20)), skipped)
    assert "fused left out: needs &lt;CUDA&gt;" in html.flips(followed, {})


# -- still -------------------------------------------------------------------------------------------------------------


def test_still_figure_has_the_same_strips_and_flips_without_pyplot(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)  # importing it is an error from here on
    followed = long_history(tmp_path)
    figure = snapshot.figure(followed, "a run")
    assert len(figure.axes) == len(charts.strips(followed)) == 8
    dashed = [line for line in figure.axes[0].lines if line.get_linestyle() == "--"]
    assert len(dashed) == len(followed.flips) == 12
    assert "×1.31 [1.27, 1.35], memory −21 %" in figure.axes[-1].get_xlabel()
    assert figure._repr_png_()[0].startswith(b"\x89PNG")


def test_still_figure_names_the_curves_that_share_a_strip(tmp_path):
    evaluated = {**make_event("eval", 5, time_s=2.5, val_nrmse={"waves": 0.5, "flow": 0.1}), "time": 1005.0}
    figure = snapshot.figure(history(tmp_path, *map(step_event, range(1, 11)), evaluated))
    (key,) = (ax.get_legend() for ax in figure.axes if ax.get_legend())
    assert [text.get_text() for text in key.get_texts()] == ["flow", "waves"]


def test_still_figure_of_a_run_without_steps_says_so(tmp_path):
    assert snapshot.figure(history(tmp_path))._repr_png_()[0].startswith(b"\x89PNG")


def test_steps_with_what_is_measured_in_turns_are_shaded_and_the_row_says_how_far_it_is(tmp_path):
    begun = flip_event(1, 10, kind="measuring")
    turn = {"kind": "turn", "time": 1000.0, "step": 20, "revision": 1, "arm": 1, "num_rounds": 0}
    told = history(tmp_path, *map(step_event, range(1, 41)), begun, turn, {**turn, "step": 30, "arm": 0})
    assert told.turns("step") == [(20, 30)] and "measuring" in html.flips(told, {})
    assert told.flips[0].what == "bf16, in turns" and html.last_flip(told.flips, "bf16", ()) is None
    say(tmp_path, {**turn, "step": 36, "num_rounds": 1, "median": 1.2, "ci95": [None, None]})
    told.read()
    assert told.turns("time") == [(10, 15), (18, 20)] and "round 2: \u00d71.20" in html.flips(told, {})
    assert charts.svg(told).count("<b style=") == 2
    assert len(snapshot.figure(told).axes[0].patches) == 2
    say(tmp_path, effect_event(1, 40, method="interleaved"))
    told.read()
    assert told.turns("step") == [(20, 30), (36, 40)] and "[1.27, 1.35]" in html.flips(told, {})
    equal = {"kind": "measuring", "changes": {}, "phases": {}}
    say(tmp_path, flip_event(2, 41, **equal), flip_event(2, 42, **equal, applied=False, reason="rank 0: budget"))
    told.read()
    assert [flip.what for flip in told.flips] == ["bf16, in turns", "two equal arms, in turns"]
    assert "not measured: rank 0: budget" in html.flips(told, {})
