"""Measures of ensembles: against slow definitions, and on ensembles whose worth is known."""

import math

import numpy as np
import pytest
import torch

from upsnb.training import ensembles

ONE = torch.ones(1)


def slow_crps(members: list[float], truth: float) -> float:
    """The integral of (F - step)^2 over all values, where F counts each member at once with its fair share."""
    ends = sorted([*members, truth])
    total, count = 0.0, len(members)
    for low, high in zip(ends, ends[1:]):
        below = sum(member <= low for member in members) / count
        total += (high - low) * (below - (truth <= low)) ** 2
    differences = sum(abs(a - b) for a in members for b in members)
    return total + differences / (2 * count**2) - (differences / (2 * count * (count - 1)) if count > 1 else 0.0)


@pytest.mark.parametrize("count", [1, 2, 3, 8])
def test_crps_is_the_integral_that_defines_it(count):
    draws = torch.Generator().manual_seed(count)
    members, truth = torch.randn(count, 50, generator=draws), torch.randn(50, generator=draws)
    expected = [slow_crps(column.tolist(), y.item()) for column, y in zip(members.T, truth)]
    torch.testing.assert_close(ensembles.fair_crps(members, truth), torch.tensor(expected), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("count", [2, 5, 19])
def test_its_mean_does_not_depend_on_the_number_of_members(count):
    draws = torch.Generator().manual_seed(0)
    members, truth = (torch.randn(size, 400_000 // count, generator=draws) for size in (count, 1))
    # two members of one normal distribution differ by 2 / sqrt(pi) on average, and half of that is its score
    assert ensembles.fair_crps(members, truth[0]).mean().item() == pytest.approx(1 / math.sqrt(math.pi), rel=0.02)


def drawn(spread: float, count: int = 19, samples: int = 40, offset: float = 0.0) -> dict:
    """What is found of members as wide as `spread` around a centre from which the truth differs by 1."""
    draws = torch.Generator().manual_seed(1)
    centre = 3 * torch.randn(samples, 2, 1, 500, generator=draws)
    truth = centre + torch.randn(centre.shape, generator=draws)
    members = centre + spread * torch.randn(count, *centre.shape, generator=draws) + offset
    return ensembles.reduce([ensembles.sample_statistics(members, truth, ONE)])


def test_a_calibrated_ensemble_is_as_wide_as_it_errs_and_holds_its_share_of_the_truth():
    found = drawn(1.0)
    assert found["spread_skill"] == pytest.approx(1.0, abs=0.02)
    assert found["coverage"]["50%"] == pytest.approx(0.5, abs=0.02)
    assert found["coverage"]["90%"] == pytest.approx(0.9, abs=0.02)
    assert found["rank_histogram"] == pytest.approx([1 / 20] * 20, abs=0.006)
    assert found["crps"] == pytest.approx(1 / math.sqrt(math.pi), rel=0.02)


def test_a_collapsed_ensemble_is_found_out_though_its_mean_is_right():
    found, right = drawn(1e-4), drawn(1.0)
    assert found["mean_nrmse"] < right["mean_nrmse"]
    assert found["spread_skill"] < 0.01 and found["coverage"]["90%"] < 0.01
    assert found["rank_histogram"][0] + found["rank_histogram"][-1] > 0.99
    assert found["crps"] > 1.3 * right["crps"]


def test_an_ensemble_that_is_too_wide_is_found_out():
    found, right = drawn(3.0), drawn(1.0)
    assert found["spread_skill"] > 2 and found["coverage"]["50%"] > 0.8
    assert max(found["rank_histogram"]) == max(found["rank_histogram"][8:12])
    assert found["crps"] > 1.2 * right["crps"]


def test_a_bias_shows_on_one_side_of_the_ranks():
    found = drawn(1.0, offset=2.0)
    assert found["rank_histogram"][0] > 0.3 > 3 * found["rank_histogram"][-1]


@pytest.mark.parametrize(
    ("count", "known"), [(1, (False, False)), (3, (True, False)), (18, (True, False)), (19, (True, True))]
)
def test_too_few_members_say_nothing_of_a_wide_interval(count, known):
    coverage = drawn(1.0, count)["coverage"].values()
    assert tuple(math.isfinite(share) for share in coverage) == known
    assert all(value == pytest.approx(share, abs=0.03) for share, value in zip((0.5, 0.9), coverage) if value == value)


def test_energy_is_a_members_and_not_that_of_their_mean():
    found = drawn(1.0)
    spectrum = {key: np.array(values) for key, values in found["spectrum"].items()}
    np.testing.assert_allclose(spectrum["members"].sum(), spectrum["truth"].sum(), rtol=0.02)  # as far from the centre
    collapsed = np.array(drawn(1e-4)["spectrum"]["members"])
    np.testing.assert_allclose(collapsed.sum() / spectrum["truth"].sum(), 0.9, atol=0.02)  # 9 of 9 + 1
    assert len(spectrum["wavenumber"]) == 251 and spectrum["wavenumber"][3] == 3


def test_one_forecast_scores_its_absolute_error():
    truth = torch.tensor([[[[1.0, 2.0, 4.0]]]])
    found = ensembles.reduce([ensembles.sample_statistics(truth[None] + 0.5, truth, 2 * ONE)])
    assert found["crps"] == pytest.approx(0.25) and found["spread_skill"] == 0 and found["members"] == 1


def test_the_split_does_not_depend_on_how_it_was_cut_up():
    draws = torch.Generator().manual_seed(2)
    members, truth = torch.randn(4, 6, 3, 2, 8, 8, generator=draws), torch.randn(6, 3, 2, 8, 8, generator=draws)
    scale = torch.tensor([1.0, 5.0])
    whole = ensembles.reduce([ensembles.sample_statistics(members, truth, scale)])
    parts = [ensembles.sample_statistics(members[:, i : i + 1], truth[i : i + 1], scale) for i in range(6)]
    cut = ensembles.reduce(parts)
    assert whole["per_sample"]["crps"] == pytest.approx(cut["per_sample"]["crps"])
    assert whole["spread_skill"] == pytest.approx(cut["spread_skill"])
    np.testing.assert_allclose(whole["rank_histogram"], cut["rank_histogram"])
    for key, values in whole["per_time"].items():
        assert len(values) == 3 and values == pytest.approx(cut["per_time"][key])


def test_channels_count_alike_whatever_their_units():
    draws = torch.Generator().manual_seed(3)
    members, truth = torch.randn(3, 5, 2, 2, 16, generator=draws), torch.randn(5, 2, 2, 16, generator=draws)
    units = torch.tensor([1.0, 1e5])
    plain = ensembles.reduce([ensembles.sample_statistics(members, truth, torch.ones(2))])
    scaled = (x * units[:, None] for x in (members, truth))
    other = ensembles.reduce([ensembles.sample_statistics(*scaled, units)])
    for key in ("crps", "mean_nrmse", "spread_skill"):
        assert plain[key] == pytest.approx(other[key], rel=1e-5)
