"""PDEBench's error metrics over a whole split, from per-sample statistics that do not know about batches or ranks.

Written from the definitions (Takamoto et al., PDEBench, arXiv 2210.07182, appendix on metrics). Two departures, both
deliberate: PDEBench's script averages batch values and divides by the last batch index, so its cRMSE, maximum error and
fRMSE depend on the evaluation batch size. Here every sample is summarised once and the whole split is reduced once:

    statistics = concatenate([sample_statistics(prediction, target, index) for ... in batches])   # any batching
    statistics = concatenate(statistics_of_every_rank)                                            # any sharding
    report = reduce(statistics)

Fields are (B, T, C, *grid) in physical units with 1, 2 or 3 grid axes and the given frames already dropped.
Non-finite values are never skipped: one of them in a prediction makes every metric of its split NaN.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from upsnb.errors import DataError

VERSION = 1  # of the definitions below: scores of two versions are never ranked together
LEAST_VARIANCE = 1e-7  # added to a frame's variance in VRMSE, as The Well has it
CORRELATED = 0.8  # below it a forecast of chaos counts as lost
FREQUENCY_BANDS = {"low": (0, 4), "mid": (4, 12), "high": (12, None)}  # wavenumbers, cycles per domain, end excluded


@torch.no_grad()
def sample_statistics(prediction: Tensor, target: Tensor, sample_index: Tensor | None = None) -> dict[str, Tensor]:
    """Summarise each sample's error by what the metrics need, and no more.

    Args:
        prediction: (B, T, C, *grid) physical units, any float dtype; half precision is widened to float32 first.
        target: as prediction, same shape.
        sample_index: (B,) integers, the samples' places in the split. With it, `concatenate` sorts the samples and
            drops repeats, so a sampler may pad its last batch to keep ranks in step.
    Returns:
        Means over grid points, e = prediction - target, float64:
        `error_square`, `target_square` (B, T, C) mean of e^2 and of target^2; `error_mean` (B, T, C) mean of e;
        `error_max` (B, T, C) largest |e|; `boundary_error_square` (B, T, C), or (B, T, 1) summed over channels in 3-D;
        `shell_error_square` (B, T, C, K) float32 |FFT(e) / N|^2 summed over wavenumber shell k;
        `target_variance` (B, T, C) mean of (target - its mean)^2;
        `correlation` (B, T, C) of prediction and target over space, NaN where one of them is the same everywhere;
        `energy` (B, 3, C, K) `energy_spectrum` of target, prediction and e at the last time;
        `sample_index` (B,) int64 when it was given.
    """
    if prediction.shape != target.shape or not 4 <= target.ndim <= 6:
        raise DataError(
            f"prediction {tuple(prediction.shape)} and target {tuple(target.shape)} -> "
            "both must be (batch, time, channel, *grid) of one shape, with 1 to 3 grid axes"
        )
    wide = torch.promote_types(torch.promote_types(prediction.dtype, target.dtype), torch.float32)
    prediction, target = prediction.to(wide), target.to(wide)
    error = prediction - target
    space = tuple(range(3, error.ndim))
    # One bad value spoils its whole frame: an infinity would vanish from a median, and one inside from the boundary.
    error = error.masked_fill(~torch.isfinite(error).flatten(3).all(-1)[(...,) + (None,) * len(space)], torch.nan)
    total = torch.float64  # sums over 128^3 points in float32 lose the digits cRMSE is made of
    own, true = (field - field.mean(space, keepdim=True) for field in (prediction, target))
    variance = true.square().mean(space, dtype=total)
    statistics = {
        "error_square": error.square().mean(space, dtype=total),
        "target_variance": variance,
        "correlation": (own * true).mean(space, dtype=total)
        / (own.square().mean(space, dtype=total) * variance).sqrt(),
        "target_square": target.square().mean(space, dtype=total),
        "error_mean": error.mean(space, dtype=total),
        "error_max": error.abs().amax(space).to(total),
        "boundary_error_square": _boundary_square(error, total),
        "shell_error_square": _positive_block_shells(error).float(),
        "energy": energy_spectrum(torch.stack((target[:, -1], prediction[:, -1], error[:, -1]), dim=1))[1],
    }
    if sample_index is not None:
        statistics["sample_index"] = sample_index.to(torch.int64)
    return statistics


def concatenate(parts: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Join statistics of batches or ranks along the samples; with `sample_index`, sorted and each sample once."""
    joined = {key: torch.cat([part[key] for part in parts]) for key in parts[0]}
    if "sample_index" in joined:
        index = joined["sample_index"]
        order = torch.argsort(index, stable=True)
        keep = order[torch.diff(index[order], prepend=index[order][:1] - 1) != 0]
        joined = {key: value[keep] for key, value in joined.items()}
    return joined


def nrmse(statistics: dict[str, Tensor]) -> Tensor:
    """Root mean squared error over root mean squared target, (B, T, C), dimensionless.

    There is no epsilon: a target that is zero everywhere gives infinity, and NaN (0 / 0) if its prediction is exact.
    A small constant there would turn an undefined ratio into an arbitrary one and bend every quiet frame.
    """
    return statistics["error_square"].sqrt() / statistics["target_square"].sqrt()


def nrmse_per_sample(statistics: dict[str, Tensor]) -> Tensor:
    """(B,) nRMSE of each sample, mean over time and channel."""
    return nrmse(statistics).mean((1, 2))


def nrmse_per_time(statistics: dict[str, Tensor]) -> Tensor:
    """(T,) nRMSE at each forecast frame, mean over samples and channels."""
    return nrmse(statistics).mean((0, 2))


def correlation_per_time(statistics: dict[str, Tensor]) -> Tensor:
    """(T,) correlation with the truth at each forecast frame, mean over samples and channels."""
    return statistics["correlation"].mean((0, 2))


def correlation_time(times: Sequence[float], correlations: Sequence[float], given_until: float) -> tuple[float, bool]:
    """How long a rollout stays correlated with the truth by CORRELATED or more, and whether it loses it at all.

    Linearly between frames, from 1 at the last given one. What is not lost within the trajectory lasts at least as
    long as that. Used for chaos, where errors saturate (Lippe et al., PDE-Refiner, arXiv 2308.05732, section 4.1).

    Args:
        times: (T,) of the forecast frames.
        correlations: (T,) from `correlation_per_time`; NaN counts as lost.
        given_until: time of the last given frame.
    """
    before, known = given_until, 1.0
    for now, value in zip(map(float, times), map(float, correlations), strict=True):
        if not value >= CORRELATED:
            share = (known - CORRELATED) / (known - value) if np.isfinite(value) else 0.0
            return before + share * (now - before) - given_until, True
        before, known = now, value
    return before - given_until, False


def reduce(statistics: dict[str, Tensor], domain_size: float = 1.0) -> dict[str, float]:
    """The metrics of a whole split by name, in units of the field but for nRMSE and VRMSE.

    nrmse_pooled: the other way to average, root of the mean of e^2 over that of the mean of target^2, both over samples
        and frames, then mean over channels. Large samples rule it, as quiet ones rule nrmse_mean.
    vrmse: mean of sqrt(mean e^2 / (variance over space + LEAST_VARIANCE)), as The Well defines it (Ohana et al., arXiv
        2412.00568): 1 is what the mean of each frame scores.
    rmse, nrmse_mean: mean over sample, time, channel. nrmse_median, nrmse_p90: of `nrmse_per_sample`, what half and a
        tenth of the samples exceed.
    crmse: sqrt of the mean over samples of (spatial mean of e)^2, then mean over time and channel.
    max_error: largest |e| over samples and space, then mean over time and channel.
    brmse: root mean square over boundary points of each sample and frame, then mean. A grid point on two faces (2-D
        corner, 3-D edge) counts twice, on three faces three times; in 3-D the squares are summed over channels.
    frmse_low, _mid, _high: sqrt of the mean over samples of |FFT(e)|^2 of a wavenumber shell, over the number of grid
        points, times `domain_size`; then mean over the shells of a band, over time and channel. NaN where the grid is
        too coarse to hold the band (`high` wants 24 points in 1-D, 26 across in 2-D and 3-D).
    Zero targets: see `nrmse`.

    Args:
        domain_size: the domain's length, area or volume; PDEBench's published numbers use 1 for every family.
    """
    per_sample = nrmse_per_sample(statistics)
    # torch.median takes the lower of two middle values, everyone else's median averages them; "higher" never mixes a
    # finite value with an infinite one
    median, most = np.median(per_sample.cpu()), np.quantile(per_sample.cpu(), 0.9, method="higher")
    pooled = statistics["error_square"].mean((0, 1)) / statistics["target_square"].mean((0, 1))
    shells = statistics["shell_error_square"].to(per_sample.dtype).mean(0).sqrt() * domain_size
    reduced = {
        "rmse": statistics["error_square"].sqrt().mean(),
        "nrmse_mean": per_sample.mean(),
        "nrmse_pooled": pooled.sqrt().mean(),
        "vrmse": (statistics["error_square"] / (statistics["target_variance"] + LEAST_VARIANCE)).sqrt().mean(),
        "nrmse_median": torch.as_tensor(median).to(per_sample),
        "nrmse_p90": torch.as_tensor(most).to(per_sample),
        "crmse": statistics["error_mean"].square().mean(0).sqrt().mean(),
        "max_error": statistics["error_max"].amax(0).mean(),
        "brmse": statistics["boundary_error_square"].sqrt().mean(),
    }
    for name, (start, end) in FREQUENCY_BANDS.items():
        reduced[f"frmse_{name}"] = shells[..., start:end].mean()
    values = torch.stack(list(reduced.values())).tolist()  # one transfer, not a dozen
    return dict(zip(reduced, values, strict=True))


def persistence(given: Tensor, num_frames: int) -> Tensor:
    """Forecast that the last given frame stays: (B, t, C, *grid) -> (B, num_frames, C, *grid), a view of `given`.

    The baseline of time-dependent problems. A static problem (Darcy: coefficient in, pressure out) has no earlier frame
    of its target; its baseline is the training split's mean field.
    """
    last = given[:, -1:]
    return last.expand(-1, num_frames, *last.shape[2:])


@torch.no_grad()
def energy_spectrum(field: Tensor) -> tuple[Tensor, Tensor]:
    """Isotropic energy spectrum: how much of the mean square sits at each wavenumber.

    |FFT(u) / N|^2 over all modes, summed over shells |k| rounded to the nearest integer, up to the smallest axis'
    Nyquist number; the corners of the Fourier box beyond it are dropped, because those shells are incomplete. So the
    sum over shells is the mean of u^2 for fields the grid resolves. Fields that are not periodic leak into high shells.

    Args:
        field: (B, T, C, *grid), any float dtype; transformed in float32 at least.
    Returns:
        wavenumber (K,) float32, cycles per domain length, and energy (B, T, C, K), the field's unit squared.
    """
    field = field.to(torch.promote_types(field.dtype, torch.float32))
    grid = field.shape[3:]
    power = _spectrum(field).abs().square()
    # rfft keeps half of the modes; all but k = 0 and Nyquist of the last axis stand for a conjugate twin too.
    last = torch.arange(power.shape[-1], device=field.device)
    power = power * torch.where((last == 0) | (2 * last == grid[-1]), 1.0, 2.0)
    axes = [torch.fft.fftfreq(n, d=1 / n, device=field.device) for n in grid[:-1]] + [last.float()]
    shell = torch.round(_radius(axes)).long()
    num_shells = min(grid) // 2 + 1
    return torch.arange(num_shells, device=field.device).float(), _sum_shells(power, shell, num_shells)


def _boundary_square(error: Tensor, total: torch.dtype) -> Tensor:
    """Mean of e^2 over the first and last slice of every grid axis, each slice's points counted."""
    square, count = 0.0, 0
    for axis in range(3, error.ndim):
        faces = error.index_select(axis, torch.tensor([0, error.shape[axis] - 1], device=error.device))
        square = square + faces.square().sum(tuple(range(3, error.ndim)), dtype=total)
        count += faces[0, 0, 0].numel()
    square = square / count
    return square.sum(2, keepdim=True) if error.ndim == 6 else square


def _spectrum(field: Tensor) -> Tensor:
    """FFT over the grid axes divided by the number of points, last axis halved; never in half precision."""
    return torch.fft.rfftn(field, dim=tuple(range(3, field.ndim)), norm="forward")


def _positive_block_shells(error: Tensor) -> Tensor:
    """|FFT(e) / N|^2 by wavenumber as PDEBench counts: (B, T, C, K).

    1-D: the N // 2 + 1 modes of a real transform. 2-D and 3-D: only modes whose indices are all in [0, n // 2), in
    shells floor(|k|) below the smallest n // 2. Half of a 2-D plane's distinct modes and three quarters of a
    3-D box's are left out by that definition; it is kept because published numbers rest on it.
    """
    grid = error.shape[3:]
    power = _spectrum(error).abs().square()
    if len(grid) == 1:
        return power
    for axis, points in enumerate(grid, start=3):
        power = power.narrow(axis, 0, points // 2)
    shell = _radius([torch.arange(n // 2, device=error.device).float() for n in grid]).floor().long()
    return _sum_shells(power, shell, min(grid) // 2)


def _radius(axes: list[Tensor]) -> Tensor:
    """|k| on the box spanned by the axes' wavenumbers; float32 roots of integer squares are exact at the integers."""
    return sum(k.square() for k in torch.meshgrid(*axes, indexing="ij")).sqrt()


def _sum_shells(power: Tensor, shell: Tensor, num_shells: int) -> Tensor:
    """Sum (B, T, C, *modes) by shell number (*modes) into (B, T, C, num_shells), dropping shells beyond."""
    power, shell = power.flatten(3), shell.flatten()
    inside = shell < num_shells
    sums = power.new_zeros(*power.shape[:3], num_shells)
    return sums.index_add_(-1, shell[inside], power[..., inside])
