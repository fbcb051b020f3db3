"""Metrics against slow loops written from the definitions, and the promises the loops cannot show."""

import itertools
import math

import numpy as np
import pytest
import torch

from upsnb.errors import DataError
from upsnb.training import metrics

GRIDS = [(27,), (10, 7), (8, 8), (6, 4, 5)]


def fields(grid, batch=5, times=3, channels=2, seed=0):
    generator = torch.Generator().manual_seed(seed)
    target = torch.randn(batch, times, channels, *grid, generator=generator) + 0.5
    return target + 0.1 * torch.randn(target.shape, generator=generator), target


def pooled(values):
    """Root mean square of all values."""
    return math.sqrt(sum(value**2 for value in values.ravel()) / values.size)


def naive(prediction, target):
    """PDEBench's metrics, one number at a time, in float64; a band without wavenumbers is NaN."""
    p, y = prediction.double().numpy(), target.double().numpy()
    num_samples, num_times, num_channels = p.shape[:3]
    grid = p.shape[3:]
    points = list(itertools.product(*map(range, grid)))
    num_points, dims = len(points), len(grid)
    e = p - y
    frames = list(itertools.product(range(num_samples), range(num_times), range(num_channels)))
    rmse, ratio, boundary = {}, {}, {}
    for f in frames:
        rmse[f] = math.sqrt(sum(e[f][x] ** 2 for x in points) / num_points)
        ratio[f] = rmse[f] / math.sqrt(sum(y[f][x] ** 2 for x in points) / num_points)
        faces = [x for x in points for axis in range(dims) for side in (0, grid[axis] - 1) if x[axis] == side]
        boundary[f] = sum(e[f][x] ** 2 for x in faces) / len(faces)
    if dims == 3:
        brmse = [math.sqrt(sum(boundary[b, t, c] for c in range(num_channels))) for b, t, _ in frames]
    else:
        brmse = [math.sqrt(value) for value in boundary.values()]

    num_shells = grid[0] // 2 + 1 if dims == 1 else min(grid) // 2
    crmse, largest, bands = [], [], {"low": [], "mid": [], "high": []}
    for t, c in itertools.product(range(num_times), range(num_channels)):
        sums = [e[b, t, c].sum() for b in range(num_samples)]
        crmse.append(math.sqrt(sum(s**2 for s in sums) / num_samples) / num_points)
        largest.append(max(abs(e[b, t, c][x]) for b in range(num_samples) for x in points))
        power = np.zeros((num_samples, num_shells))
        for b in range(num_samples):
            transform = np.fft.fftn(e[b, t, c])
            modes = (
                [(k,) for k in range(num_shells)] if dims == 1 else itertools.product(*(range(n // 2) for n in grid))
            )
            for k in modes:
                shell = math.floor(math.sqrt(sum(i**2 for i in k)))
                if shell < num_shells:
                    power[b, shell] += abs(transform[k]) ** 2
        spectrum = np.sqrt(power.mean(0)) / num_points
        for shell in range(num_shells):
            bands["low" if shell < 4 else "mid" if shell < 12 else "high"].append(spectrum[shell])
    per_sample = [
        np.mean([ratio[b, t, c] for t in range(num_times) for c in range(num_channels)]) for b in range(num_samples)
    ]
    reduced = {
        "rmse": np.mean(list(rmse.values())),
        "nrmse_mean": np.mean(list(ratio.values())),
        "nrmse_pooled": np.mean([pooled(e[:, :, c]) / pooled(y[:, :, c]) for c in range(num_channels)]),
        "vrmse": np.mean([rmse[f] / math.sqrt(np.var(y[f]) + 1e-7) for f in frames]),
        "nrmse_median": np.median(per_sample),
        "nrmse_p90": sorted(per_sample)[math.ceil(0.9 * (num_samples - 1))],
        "crmse": np.mean(crmse),
        "max_error": np.mean(largest),
        "brmse": np.mean(brmse),
    }
    return reduced | {f"frmse_{name}": np.mean(values) if values else math.nan for name, values in bands.items()}


@pytest.mark.parametrize("grid", GRIDS)
def test_every_metric_matches_a_loop_over_the_definition(grid):
    prediction, target = fields(grid)
    reduced = metrics.reduce(metrics.sample_statistics(prediction, target))
    assert reduced == pytest.approx(naive(prediction, target), rel=2e-5, nan_ok=True)


def test_hand_computed_one_dimensional_case():
    # Two samples, one frame, four points: e = (1, 0, 0, 1) and (0, 2, 0, 0).
    target = torch.tensor([[2.0, 2.0, 2.0, 2.0], [0.0, 4.0, 0.0, 0.0]]).view(2, 1, 1, 4)
    error = torch.tensor([[1.0, 0.0, 0.0, 1.0], [0.0, 2.0, 0.0, 0.0]]).view(2, 1, 1, 4)
    reduced = metrics.reduce(metrics.sample_statistics(target + error, target))
    assert reduced["rmse"] == pytest.approx((math.sqrt(0.5) + 1) / 2)
    assert reduced["nrmse_mean"] == pytest.approx((math.sqrt(0.5) / 2 + 1 / 2) / 2)
    assert reduced["crmse"] == pytest.approx(math.sqrt((2**2 + 2**2) / 2) / 4)
    assert reduced["max_error"] == 2.0
    assert reduced["brmse"] == pytest.approx((1 + 0) / 2)


def test_corners_count_twice_in_two_dimensions():
    target = torch.ones(1, 1, 1, 4, 3)
    corner, edge, inside = target.clone(), target.clone(), target.clone()
    corner[0, 0, 0, 0, 0] += 1
    edge[0, 0, 0, 1, 0] += 1
    inside[0, 0, 0, 1, 1] += 1
    values = [metrics.reduce(metrics.sample_statistics(p, target))["brmse"] for p in (corner, edge, inside)]
    assert values == pytest.approx([math.sqrt(2 / 14), math.sqrt(1 / 14), 0])


@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize("batches", [(1, 1, 1, 1, 1), (2, 3), (4, 1)])
def test_batch_size_does_not_matter(grid, batches):
    prediction, target = fields(grid)
    whole = metrics.reduce(metrics.sample_statistics(prediction, target))
    pairs = zip(prediction.split(batches), target.split(batches), strict=True)
    parts = metrics.concatenate([metrics.sample_statistics(p, y) for p, y in pairs])
    assert metrics.reduce(parts) == pytest.approx(whole, rel=1e-5, nan_ok=True)


def test_padded_shards_in_any_order_give_the_same_samples():
    prediction, target = fields((16,), batch=7)
    index = torch.arange(7)
    whole = metrics.sample_statistics(prediction, target, index)
    # Two ranks, strided, padded to 4 each: sample 0 is evaluated twice.
    shards = [torch.tensor([1, 3, 5, 0]), torch.tensor([0, 2, 4, 6])]
    joined = metrics.concatenate([metrics.sample_statistics(prediction[s], target[s], s) for s in shards])
    assert joined["sample_index"].tolist() == index.tolist()
    torch.testing.assert_close(metrics.nrmse_per_sample(joined), metrics.nrmse_per_sample(whole))
    assert metrics.reduce(joined) == pytest.approx(metrics.reduce(whole), rel=1e-6, nan_ok=True)


def test_errors_scale_with_the_unit_and_nrmse_does_not():
    prediction, target = fields((26, 26), batch=3)
    one = metrics.reduce(metrics.sample_statistics(prediction, target))
    thousand = metrics.reduce(metrics.sample_statistics(1000 * prediction, 1000 * target))
    for key in one:
        unit = 1 if "nrmse" in key or key == "vrmse" else 1000
        assert thousand[key] == pytest.approx(one[key] * unit, rel=1e-4), key


@pytest.mark.parametrize(("wavenumber", "band"), [(2, "low"), (3, "low"), (4, "mid"), (11, "mid"), (12, "high")])
@pytest.mark.parametrize("dims", [1, 2])
def test_a_single_sine_lands_in_its_band_with_half_its_amplitude(wavenumber, band, dims):
    points, amplitude = 64, 0.3
    x = torch.arange(points) / points
    error = amplitude * torch.sin(2 * math.pi * wavenumber * x)
    error = error.expand(1, 1, 1, *[points] * dims)
    reduced = metrics.reduce(metrics.sample_statistics(error + 1, torch.ones(error.shape)))
    # |FFT(a sin)| / N is a / 2 at +k; the mean over the band's shells divides by their number.
    num_shells = {"low": 4, "mid": 8, "high": 33 - 12 if dims == 1 else 32 - 12}[band]
    for name in metrics.FREQUENCY_BANDS:
        expected = amplitude / 2 / num_shells if name == band else 0
        assert reduced[f"frmse_{name}"] == pytest.approx(expected, abs=1e-7), name


def test_domain_size_multiplies_frmse_alone():
    statistics = metrics.sample_statistics(*fields((64,)))
    one, ten = metrics.reduce(statistics), metrics.reduce(statistics, domain_size=10.0)
    assert ten == pytest.approx({k: v * (10 if k.startswith("frmse") else 1) for k, v in one.items()})


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("grid", [(64,), (26, 26), (26, 26, 26)])
def test_one_bad_value_inside_spoils_every_metric(bad, grid):
    prediction, target = fields(grid, batch=5, times=1, channels=1)
    prediction[(3, 0, 0) + tuple(n // 2 for n in grid)] = bad
    statistics = metrics.sample_statistics(prediction, target)
    assert not any(map(math.isfinite, metrics.reduce(statistics).values()))
    assert torch.isfinite(metrics.nrmse_per_sample(statistics)).tolist() == [True, True, True, False, True]


def test_zero_target_is_infinite_not_hidden():
    target = torch.zeros(1, 1, 1, 8)
    assert metrics.reduce(metrics.sample_statistics(target + 1, target))["nrmse_mean"] == math.inf
    assert math.isnan(metrics.reduce(metrics.sample_statistics(target, target))["nrmse_mean"])


def test_half_precision_is_widened_before_anything_is_squared():
    prediction, target = fields((8, 8))
    half = metrics.reduce(metrics.sample_statistics((1e3 * prediction).half(), (1e3 * target).half()))
    wide = metrics.reduce(metrics.sample_statistics((1e3 * prediction).half().float(), (1e3 * target).half().float()))
    assert half == pytest.approx(wide, nan_ok=True)


def test_small_means_survive_large_fields():
    # A conserved quantity off by 1e-3 under fluctuations of 1e4: float32 sums lose its digits.
    half = 1e4 * torch.randn(2**17, generator=torch.Generator().manual_seed(0))
    error = torch.cat([half, -half.roll(777)]).view(1, 1, 1, 512, 512) + 1e-3
    reduced = metrics.reduce(metrics.sample_statistics(error, torch.zeros(error.shape)))
    assert reduced["crmse"] == pytest.approx(abs(float(error.double().mean())), rel=1e-6)


def test_per_sample_and_per_time_average_to_the_same_mean():
    statistics = metrics.sample_statistics(*fields((9, 9)))
    mean = metrics.reduce(statistics)["nrmse_mean"]
    assert metrics.nrmse(statistics).shape == (5, 3, 2)
    assert metrics.nrmse_per_sample(statistics).shape == (5,)
    assert metrics.nrmse_per_time(statistics).shape == (3,)
    assert float(metrics.nrmse_per_sample(statistics).mean()) == pytest.approx(mean)
    assert float(metrics.nrmse_per_time(statistics).mean()) == pytest.approx(mean)


def test_what_cannot_be_compared_is_refused():
    prediction, target = fields((8,))
    with pytest.raises(DataError, match="one shape"):
        metrics.sample_statistics(prediction[:, :, :1], target)  # would broadcast silently


def test_persistence_repeats_the_last_given_frame():
    given = torch.randn(2, 4, 1, 8)
    forecast = metrics.persistence(given, 6)
    assert forecast.shape == (2, 6, 1, 8)
    assert all(torch.equal(forecast[:, t], given[:, -1]) for t in range(6))
    still = metrics.sample_statistics(forecast, given[:, -1:].expand(-1, 6, -1, -1))
    assert metrics.reduce(still)["nrmse_mean"] == 0


@pytest.mark.parametrize("grid", [(32,), (31,), (32, 24), (16, 16, 12), (15, 16, 11)])
def test_spectrum_sums_to_the_mean_square_of_a_resolved_field(grid):
    # Random waves well inside the smallest Nyquist number, on every sign of wavenumber.
    generator = torch.Generator().manual_seed(1)
    axes = torch.meshgrid(*[torch.arange(n) / n for n in grid], indexing="ij")
    field = torch.full((2, 1, 3, *grid), 0.7)
    for _ in range(8):
        k = torch.randint(-2, 3, (len(grid),), generator=generator)
        field = field + torch.cos(2 * math.pi * sum(int(i) * x for i, x in zip(k, axes, strict=True)) + k.sum())
    wavenumber, energy = metrics.energy_spectrum(field)
    assert energy.shape == (2, 1, 3, min(grid) // 2 + 1)
    assert wavenumber.tolist() == list(range(min(grid) // 2 + 1))
    torch.testing.assert_close(energy.sum(-1), field.square().mean(tuple(range(3, field.ndim))), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("axis", [0, 1])
def test_spectrum_puts_a_wave_in_its_shell_whatever_its_direction(axis):
    wave = 2.0 * torch.cos(2 * math.pi * 5 * torch.arange(32) / 32)
    field = (wave[:, None] if axis == 0 else wave[None, :]).expand(1, 1, 1, 32, 32)
    _, energy = metrics.energy_spectrum(field)
    expected = torch.zeros(17)
    expected[5] = 2.0  # a^2 / 2
    torch.testing.assert_close(energy[0, 0, 0], expected, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("points", [16, 17])
def test_spectrum_in_one_dimension_holds_every_mode_once(points):
    field = torch.randn(1, 1, 1, points)  # noise reaches the Nyquist number, which has no twin on even grids
    _, energy = metrics.energy_spectrum(field)
    torch.testing.assert_close(energy.sum(-1), field.square().mean(-1))


def test_spectrum_rounds_oblique_waves_to_the_nearest_shell():
    x, y = torch.meshgrid(torch.arange(32) / 32, torch.arange(32) / 32, indexing="ij")
    _, energy = metrics.energy_spectrum(torch.cos(2 * math.pi * (2 * x - 2 * y)).view(1, 1, 1, 32, 32))
    assert int(energy.argmax()) == 3  # |k| = 2.83


# -- correlation -----------------------------------------------------------------------------------------------------


def test_correlation_is_of_shapes_and_known_where_it_is_known():
    x = 2 * torch.pi * torch.arange(64) / 64
    wave, other = torch.sin(x), torch.cos(x)
    targets = wave.expand(1, 5, 1, 64)
    forecasts = torch.stack((3 * wave + 7, -wave, other, 0.6 * wave + 0.8 * other, torch.ones(64)))[None, :, None]
    found = metrics.sample_statistics(forecasts, targets)["correlation"][0, :, 0]
    torch.testing.assert_close(found[:4], torch.tensor([1.0, -1.0, 0.0, 0.6]).double(), atol=1e-6, rtol=0)
    assert found[4].isnan(), "what is the same everywhere is correlated with nothing"


def test_correlation_is_numpy_s_on_planes_of_several_channels():
    random = torch.Generator().manual_seed(0)
    target = torch.randn(3, 2, 2, 6, 8, generator=random)
    prediction = target + 0.5 * torch.randn(target.shape, generator=random)
    statistics = metrics.sample_statistics(prediction, target)
    expected = np.empty((3, 2, 2))
    for place in np.ndindex(expected.shape):
        expected[place] = np.corrcoef(prediction[place].ravel(), target[place].ravel())[0, 1]
    np.testing.assert_allclose(statistics["correlation"], expected, rtol=1e-5)
    np.testing.assert_allclose(metrics.correlation_per_time(statistics), expected.mean((0, 2)), rtol=1e-5)


@pytest.mark.parametrize(
    ("correlations", "lasts"),
    [
        ((1.0, 0.9, 0.7), (2.5, True)),  # halfway between 0.9 and 0.7
        ((0.6, 0.9, 0.9), (0.5, True)),  # at once, and what comes back later was lost
        ((0.9, 0.8, 0.8), (3.0, False)),
        ((0.9, float("nan"), 0.9), (1.0, True)),
    ],
)
def test_correlation_lasts_until_it_falls_below_its_limit(correlations, lasts):
    assert metrics.correlation_time([11.0, 12.0, 13.0], correlations, 10.0) == (pytest.approx(lasts[0]), lasts[1])
