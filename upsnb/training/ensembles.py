"""How good an ensemble is: what its members say together, and whether they differ as much as they err.

Written from the definitions: fair CRPS and its terms (Ferro, QJRMS 140, 2014), spread over skill (Fortin et al., J.
Hydrometeorology 15, 2014), rank histograms (Hamill, Mon. Wea. Rev. 129, 2001). Like in `metrics`, each sample is
summarised once, on any rank and in any batch, and a split is reduced once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from upsnb.training import metrics

COVERAGES = (0.5, 0.9)  # shares of the truth that central intervals of the members are to hold


def fair_crps(members: Tensor, truth: Tensor) -> Tensor:
    """Continuous ranked probability score of each value, as if there were any number of members.

    mean |x_i - y| - sum |x_i - x_j| / (2 M (M - 1)): its expectation does not depend on M. Of one member: |x - y|.
    A single value may lie below zero, what counts is the mean over many.

    Args:
        members: (M, ...).
        truth: (...).
    """
    error, count = (members - truth).abs().mean(0), len(members)
    pairs = [(members[i] - members[j]).abs() for i in range(count) for j in range(i)]
    return error - sum(pairs) / (count * (count - 1)) if pairs else error


@torch.no_grad()
def sample_statistics(members: Tensor, truth: Tensor, scale: Tensor) -> dict[str, Tensor]:
    """Summarise each sample's ensemble, in units of `scale`.

    Args:
        members: (M, B, T, C, *grid) physical units; M of 1 is a forecast without a spread.
        truth: (B, T, C, *grid).
        scale: (C,) standard deviations of the training data.
    Returns:
        Means over grid points, float64: `crps` (B, T, C) fair; `mean_error_square` and `variance` (B, T, C) of the
        members' mean, and unbiased among them; `truth_square` (B, T, C); `correlation` (B, T, C) of their mean with the
        truth; `covered` (B, T, C, len(COVERAGES)) shares of points, NaN where the members are too few to say; `rank`
        (B, T, C, M + 1) shares of points by how many members lie below the truth;
        `energy` (B, 2, C, K) `metrics.energy_spectrum` at the last time, of the truth and of a member on average.
    """
    space = tuple(range(3, truth.ndim))
    unit = scale.double().view(-1, *(1,) * len(space))
    members, truth = members.double() / unit, truth.double() / unit
    mean, count = members.mean(0), len(members)
    below = (members < truth).sum(0)
    own, true = (field - field.mean(space, keepdim=True) for field in (mean, truth))
    last = torch.cat((truth[None, :, -1], members[:, :, -1]))  # (1 + M, B, C, *grid)
    energy = metrics.energy_spectrum(last)[1]
    return {
        "crps": fair_crps(members, truth).mean(space),
        "mean_error_square": (mean - truth).square().mean(space),
        "variance": members.var(0).mean(space) if count > 1 else torch.zeros(truth.shape[:3], dtype=torch.float64),
        "truth_square": truth.square().mean(space),
        "correlation": (own * true).mean(space) / (own.square().mean(space) * true.square().mean(space)).sqrt(),
        "covered": torch.stack([_covered(members, truth, share).mean(space) for share in COVERAGES], dim=-1),
        "rank": torch.stack([(below == rank).double().mean(space) for rank in range(count + 1)], dim=-1),
        "energy": torch.stack((energy[0], energy[1:].mean(0)), dim=1),
    }


def _covered(members: Tensor, truth: Tensor, share: float) -> Tensor:
    """1 where the truth lies in the central interval that holds so much of what the members are drawn from, else 0.

    Of M members the k-th smallest lies on average at k / (M + 1) of the distribution, and linearly between two.
    """
    place = (1 - share) / 2 * (len(members) + 1) - 1  # of its lower end among the members, the smallest of which is 0
    lower = math.floor(place + 1e-9)
    if lower < 0 or len(members) < 2:
        return torch.full_like(truth, math.nan)
    ordered = members.sort(0).values
    low, high = (torch.lerp(rising[lower], rising[lower + 1], place - lower) for rising in (ordered, ordered.flip(0)))
    return ((truth >= low) & (truth <= high)).double()


def reduce(parts: Sequence[dict[str, Tensor]]) -> dict:
    """What a split's ensembles are worth, over all samples, frames and channels, and by sample and frame.

    spectrum: energy by wavenumber at the last time, of the truth and of a member, which a mean would smooth.
    spread_skill: sqrt((M + 1) / M mean variance) over the root mean square error of the members' mean: 1 where an
    ensemble is as wide as it errs, less where it is too sure of itself.
    """
    found = {key: torch.cat([part[key] for part in parts]) for key in parts[0]}
    count = found["rank"].shape[-1] - 1
    wide, off = (found[key].mean((0, 2)) for key in ("variance", "mean_error_square"))
    wide, relative = (count + 1) / count * wide, (found["mean_error_square"] / found["truth_square"]).sqrt()
    true, drawn = found["energy"].mean((0, 2))
    return {
        "members": count,
        "crps": found["crps"].mean().item(),
        "mean_nrmse": relative.mean().item(),
        "spread_skill": (wide.mean() / off.mean()).sqrt().item(),
        "coverage": dict(zip(map("{:.0%}".format, COVERAGES), found["covered"].mean((0, 1, 2)).tolist())),
        "rank_histogram": found["rank"].mean((0, 1, 2)).tolist(),
        "spectrum": {"wavenumber": list(range(len(true))), "truth": true.tolist(), "members": drawn.tolist()},
        "per_sample": {"crps": found["crps"].mean((1, 2)).tolist(), "mean_nrmse": relative.mean((1, 2)).tolist()},
        "per_time": {
            "crps": found["crps"].mean((0, 2)).tolist(),
            "spread": wide.sqrt().tolist(),
            "mean_rmse": off.sqrt().tolist(),
            "correlation": found["correlation"].mean((0, 2)).tolist(),
        },
    }
