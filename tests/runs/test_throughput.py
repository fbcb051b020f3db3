"""The one definition of how fast a run is: steady steps alone, whole windows, an interval where there are several."""

import numpy as np
import pytest
from made_runs import step

from upsnb.runs import throughput
from upsnb.runs.throughput import (
    block_length,
    median_with_interval,
    steady_throughput,
    steady_windows,
    weighted_median,
)


def test_only_steady_steps_count():
    events = [step(n, ms=5000.0, steady=False) for n in range(1, 6)] + [step(n) for n in range(6, 46)]
    speed = steady_throughput(events)
    assert speed["num_windows"] == 4
    assert speed["median"] == pytest.approx(160) and speed["ci95"] == pytest.approx([160, 160])


def test_interval_contains_the_median_and_repeats():
    random = np.random.default_rng(1)
    events = [step(n, ms=ms) for n, ms in enumerate(random.uniform(50, 150, 400), start=1)]
    speed = steady_throughput(events)
    low, high = speed["ci95"]
    assert low < speed["median"] < high and high - low < 20
    assert steady_throughput(events) == speed


def test_an_interval_of_values_that_resemble_their_neighbours_holds_the_truth(monkeypatch):
    monkeypatch.setattr(throughput, "NUM_RESAMPLES", 200)
    draws, num, num_series = np.random.default_rng(0), 240, 100
    series = np.zeros((num_series, num))  # AR(1): a steady state around 0
    series[:, 0] = draws.normal(scale=1.4, size=num_series)
    for at in range(1, num):
        series[:, at] = 0.7 * series[:, at - 1] + draws.normal(size=num_series)

    def coverage(order):
        intervals = [median_with_interval(order(values))["ci95"] for values in series]
        return np.mean([low <= 0 <= high for low, high in intervals])

    assert coverage(draws.permutation) < 0.7, "taken for independent, as they are in another order"
    assert 0.85 <= coverage(np.asarray) <= 1


def test_independent_values_are_drawn_one_by_one():
    draws = np.random.default_rng(0)
    assert np.mean([block_length(draws.normal(size=100)) for _ in range(100)]) < 2
    assert block_length(np.ones(40)) == block_length(np.array([1.0, 2.0, 3.0])) == 1
    assert block_length(np.repeat([1.0, 2.0], 20)) == 10


def test_window_is_samples_over_seconds_and_not_a_mean_of_rates():
    events = [step(n, ms=(100.0, 300.0)[n % 2]) for n in range(1, 41)]
    assert steady_throughput(events)["median"] == pytest.approx(16 / 0.2, rel=0.01)


def test_a_window_counts_by_its_length():
    """Beside another program three of four windows are fast, and most of the time goes into the fourth."""
    events = [step(n, ms=5000.0 if n % 31 == 0 else 100.0) for n in range(1, 311)]
    rates = [window.samples_per_s for window in steady_windows(events)]
    speed = steady_throughput(events)
    assert np.median(rates) == pytest.approx(160) and speed["median"] < 10 and speed["ci95"][0] < 10
    half = sum(window.steady_s for window in steady_windows(events) if window.samples_per_s > speed["median"])
    assert half < sum(window.steady_s for window in steady_windows(events)) / 2


@pytest.mark.parametrize("num", [1, 2, 7, 8])
def test_of_equal_weights_a_weighted_median_is_the_median(num):
    values = np.random.default_rng(num).normal(size=(5, num))
    assert weighted_median(values, np.full_like(values, 0.5)) == pytest.approx(np.median(values, axis=1))
    repeated = np.repeat(values, np.arange(1, num + 1), axis=1)
    weights = np.broadcast_to(np.arange(1.0, num + 1), values.shape)
    assert weighted_median(values, weights) == pytest.approx(np.median(repeated, axis=1))


def test_window_passes_over_validations_but_not_over_a_relaunch():
    validated_every_half_second = [step(n, ms=100.0 if n % 6 else 9000.0, steady=n % 6 > 0) for n in range(1, 61)]
    speed = steady_throughput(validated_every_half_second)
    assert speed["num_windows"] == 5 and speed["median"] == pytest.approx(160)
    relaunched = [step(n) for n in range(1, 7)] + [{"kind": "segment", "step": 6}] + [step(n) for n in range(7, 13)]
    assert steady_throughput(relaunched)["num_windows"] == 0
    assert steady_throughput([e for e in relaunched if e["kind"] == "step"])["num_windows"] == 1


def test_window_holds_as_many_steps_as_there_are_datasets():
    events = [step(n, ms=2000.0, names=[("a", "b", "c")[n % 3]]) for n in range(1, 10)]
    assert steady_throughput(events)["num_windows"] == 3


@pytest.mark.parametrize("events", [[], [step(1, steady=False)], [step(1)]])
def test_without_a_window_nothing_is_claimed(events):
    assert steady_throughput(events) == {"median": None, "ci95": [None, None], "num_windows": 0}


def test_one_window_has_no_interval():
    speed = steady_throughput([step(n) for n in range(1, 12)])
    assert speed["median"] == pytest.approx(160) and speed["ci95"] == [None, None] and speed["num_windows"] == 1


def test_windows_say_when_they_were():
    events = [step(n, steady=n > 5) for n in range(1, 26)]
    assert steady_windows(events) == [pytest.approx((0.5, 1.5, 160, 1)), pytest.approx((1.5, 2.5, 160, 1))]
