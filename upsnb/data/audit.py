"""What a dataset can test, and what it cannot: samples that occur twice, few dimensions, a look-up that scores.

Everything is measured on a bounded number of samples and points, so that a file of many GiB takes seconds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from upsnb.data.source import Source, first_alike, initial_states, nearest_states, thinned

MOST_SAMPLES = 10_000  # of which initial states are read
MOST_TESTED = 256  # test samples whose trajectories are read
FOLLOWED = 32  # of these, those whose means are followed in time

SAME = 1e-6  # relative distance of initial states that are one and the same in float32
NEAR = 1e-2  # and of those that no model tells apart at the accuracy that it reaches
MOST_NEAR = 0.1  # share of test samples that may be so near to a training sample
EASY_LOOKUP = 0.02  # nRMSE of a look-up, below which a good score says little
FEW_DIMENSIONS = 2.5
EXPLAINED = 0.999  # share of the variance that linear dimensions have to explain
DRIFT = 1e-2  # of a conserved mean, over the spread of the field
UNSTEADY = 1e-3  # nRMSE of the steady solution
OFF = 0.05  # of a coefficient, relative


@dataclass(frozen=True)
class Finding:
    """Something that a score on this dataset does not show."""

    name: str
    found: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.name}: {self.found} -> {self.remedy}"


@dataclass(frozen=True)
class Audit:
    """What was measured of a dataset and its splits; None where it means nothing or there was too little."""

    num_samples: int  # looked at
    num_distinct: int  # initial states, with their parameters, that differ
    test_seen: float  # share of test samples that begin as a training sample does
    test_near: float  # or nearly so
    linear_dimensions: int  # that explain 99.9 % of the variance of initial states
    dimensions: float | None  # of the set they lie on (Facco et al. 2017)
    lookup_nrmse: float  # mean over test samples: the trajectory of the nearest training sample as the forecast
    lookup_nrmse_median: float
    persistence_nrmse: float | None
    drift: float | None  # of each channel's mean over space, largest, over the channel's spread
    steady_nrmse: float | None  # of the equation's steady solution, for steady families
    coefficients: Mapping[str, tuple[float, float]] = field(default_factory=dict)  # name: (said, fitted)
    findings: tuple[Finding, ...] = ()


def audit(source: Source, splits: Mapping[str, np.ndarray]) -> Audit:
    """Measure what a dataset can test.

    Args:
        splits: "train" and "test": sample indices.
    """
    family = source.family
    train, test = (thinned(splits[name], most) for name, most in (("train", MOST_SAMPLES), ("test", MOST_TESTED)))
    both = initial_states(source, np.concatenate([train, test]))
    known, asked = np.split(both, [len(train)])
    nearest, distance = nearest_states(asked, known)
    different = np.unique(first_alike(both))
    lookup, persisted = _lookup(source, test, train[nearest])
    measured = {
        "num_samples": len(both),
        "num_distinct": len(different),
        "test_seen": float(np.mean(distance <= SAME)),
        "test_near": float(np.mean(distance <= NEAR)),
        "linear_dimensions": linear_dimensions(both),
        "dimensions": intrinsic_dimensions(both[different]),
        "lookup_nrmse": float(np.mean(lookup)),
        "lookup_nrmse_median": float(np.median(lookup)),
        "persistence_nrmse": float(np.mean(persisted)) if persisted is not None else None,
        "drift": _drift(source, test) if "conservation" in family.priors else None,
        "steady_nrmse": steady_nrmse(source, thinned(test, 16)) if has_steady(source) else None,
        "coefficients": _coefficients(source, test) if family.mean_rate else {},
    }
    return Audit(**measured, findings=tuple(_findings(measured, len(test))))


# -- initial states ------------------------------------------------------------------------------------------------


def leaks(distance: np.ndarray) -> bool:
    """Whether test samples with these distances to their nearest training samples test too little."""
    return bool(np.any(distance <= SAME) or np.mean(distance <= NEAR) > MOST_NEAR)


def judging(result: Mapping) -> Mapping:
    """The numbers of an evaluation that judge: of distinct samples alone where the split leaks and has some."""
    return (result.get("leak") or {}).get("distinct") or result


def headline(result: Mapping) -> float | None:
    """The error that judges: nRMSE, rolled out to the end where there is a time; of another workload its metric."""
    numbers = judging(result)
    return numbers.get("rollout_nrmse_mean", numbers.get("nrmse_mean", numbers.get("error")))


def linear_dimensions(states: np.ndarray, most: int = 512) -> int:
    """How many principal components explain EXPLAINED of the variance, of at most so many states."""
    chosen = thinned(np.arange(len(states)), most)
    centred = states[chosen].astype(np.float64) - states[chosen].mean(axis=0, dtype=np.float64)
    variance = np.linalg.eigvalsh(centred @ centred.T)[::-1].clip(min=0)
    if variance.sum() <= 1e-12 * np.square(states[chosen], dtype=np.float64).sum():
        return 0
    return int(np.searchsorted(np.cumsum(variance) / variance.sum(), EXPLAINED)) + 1


def intrinsic_dimensions(states: np.ndarray, most: int = 1024) -> float | None:
    """Dimension of the set that states lie on, from the ratio of distances to the two nearest of each.

    E. Facco et al., Sci. Rep. 7, 12140 (2017), by maximum likelihood; of the largest tenth of the ratios only their
    number counts. None of fewer than 10 different states.
    """
    chosen = states[thinned(np.arange(len(states)), most)].astype(np.float64)
    if len(chosen) < 10:
        return None
    squares = np.square(chosen).sum(axis=1)
    distances = squares[:, None] + squares - 2 * chosen @ chosen.T
    np.fill_diagonal(distances, np.inf)
    first, second = np.sqrt(np.partition(distances, 1, axis=1)[:, :2].clip(min=1e-24)).T
    ratios = np.sort(np.log(second / first))[: int(0.9 * len(chosen))]
    total = ratios.sum() + (len(chosen) - len(ratios)) * ratios[-1]
    return float(len(ratios) / total) if total > 0 else None


# -- trajectories ---------------------------------------------------------------------------------------------------


def _lookup(source: Source, test: np.ndarray, twins: np.ndarray) -> tuple[np.ndarray, np.ndarray | None]:
    """nRMSE of each test sample with its twin as the forecast, and of its last given frame held; (n,) each."""
    timed = source.family.time_dependent
    given = min(source.family.given_frames, source.num_times - 1) if timed else 0
    frames = np.arange(given, source.num_times)
    scores, held = np.zeros((2, len(test)))
    for rows, some in source.blocks(np.arange(len(test)), frames):
        truth, twin = (source.read(chosen[rows], some)[1] for chosen in (test, twins))
        scores[rows] += nrmse(twin, truth) * len(some) / len(frames)
        if timed:
            last = source.read(test[rows], [given - 1])[1]
            held[rows] += nrmse(np.broadcast_to(last, truth.shape), truth) * len(some) / len(frames)
    return scores, held if timed else None


def nrmse(forecast: np.ndarray, truth: np.ndarray) -> np.ndarray:
    """PDEBench's nRMSE of each sample: mean over frames and channels of |e| / |y|, norms over space. (n, t, C, ...)."""
    axes = tuple(range(3, truth.ndim))
    error = np.sqrt(np.square(forecast - truth, dtype=np.float64).sum(axis=axes))
    size = np.sqrt(np.square(truth, dtype=np.float64).sum(axis=axes))
    return (error / np.maximum(size, 1e-30)).mean(axis=(1, 2))


def _drift(source: Source, test: np.ndarray) -> float:
    """How far a channel's mean over space moves in time, at most, over the channel's spread."""
    chosen, frames = thinned(test, FOLLOWED), np.arange(source.num_times)
    means, squares = np.empty((2, len(chosen), len(frames), len(source.family.channels)))
    for rows, some in source.blocks(np.arange(len(chosen)), frames):
        fields = source.read(chosen[rows], some)[1].astype(np.float64)
        space, where = tuple(range(3, fields.ndim)), np.ix_(rows, some)
        means[where], squares[where] = fields.mean(axis=space), np.square(fields).mean(axis=space)
    spread = np.sqrt(np.maximum(squares.mean(axis=(0, 1)) - np.square(means.mean(axis=(0, 1))), 0))
    return float((np.abs(means - means[:, :1]).max(axis=(0, 1)) / np.maximum(spread, 1e-30)).max())


def has_steady(source: Source) -> bool:
    """Whether a steady solution can be had for the stored fields: it is solved on whole cells, not on some of them."""
    return source.family.steady is not None and source.reduced_resolution == 1


def steady_nrmse(source: Source, samples: np.ndarray) -> float:
    """nRMSE of the steady solution, mean over samples: 0 where the stored fields are steady."""
    inputs, targets = source.read(samples)
    solved = [source.family.steady(fields, *row) for fields, row in zip(inputs[:, 0], source.parameters[samples])]
    return float(nrmse(np.stack(solved)[:, None], targets).mean())


def _coefficients(source: Source, test: np.ndarray) -> dict[str, tuple[float, float]]:
    """A coefficient as the file says, and as it follows from d<u>/dt = coefficient <f(u)> between frames."""
    name, rate = source.family.mean_rate
    chosen = thinned(test, FOLLOWED)
    said = source.parameters[chosen, list(source.family.parameters).index(name)].astype(np.float64)
    if not said.any():
        return {}
    fields = source.read(chosen)[1].astype(np.float64)
    space = tuple(range(2, fields.ndim))
    means, rates = fields.mean(axis=space), rate(fields).mean(axis=space)
    change = np.diff(means, axis=1)
    integral = 0.5 * (rates[:, 1:] + rates[:, :-1]) * np.diff(source.times.astype(np.float64))
    expected = said.reshape(-1, *(1,) * (change.ndim - 1)) * integral  # files may differ in it
    mean = float(said.mean())
    return {name: (mean, mean * float((change * expected).sum() / np.square(expected).sum()))}


# -- in words ------------------------------------------------------------------------------------------------------


def table(measured: Audit) -> list[str]:
    """What was measured, a line each."""
    seen, near = f"{measured.test_seen:.1%}", f"{measured.test_near:.1%}"
    dimensions = "-" if measured.dimensions is None else f"{measured.dimensions:.1f}"
    lines = [
        f"different initial states: {measured.num_distinct} of {measured.num_samples}",
        f"test samples that begin as a training sample does: {seen}, within {NEAR:.0%}: {near}",
        f"dimensions of initial states: {measured.linear_dimensions} linear, {dimensions} of their set",
        f"nRMSE of the nearest training sample: {measured.lookup_nrmse:.3g}, median {measured.lookup_nrmse_median:.3g}",
    ]
    more = {
        "nRMSE of persistence": measured.persistence_nrmse,
        "largest move of a conserved mean, over the field's spread": measured.drift,
        "nRMSE of the steady solution": measured.steady_nrmse,
    }
    lines += [f"{what}: {value:.3g}" for what, value in more.items() if value is not None]
    return lines + [
        f"{name}: {said:g} by name, {fitted:.3g} by the fields"
        for name, (said, fitted) in measured.coefficients.items()
    ]


def _findings(measured: dict, num_test: int):
    seen, near = (round(measured[name] * num_test) for name in ("test_seen", "test_near"))
    if seen:
        found = f"{seen} of {num_test} test samples begin as a training sample does"
        yield Finding("the test split leaks", found, "data.split.convention: distinct, or other data")
    elif near > MOST_NEAR * num_test:
        found = f"{near} of {num_test} test samples begin within {NEAR:.0%} of a training sample"
        yield Finding("the test split is close", found, "look at the look-up's score before believing a model's")
    if measured["num_distinct"] < measured["num_samples"]:
        found = f"{measured['num_distinct']} different initial states in {measured['num_samples']} samples"
        yield Finding("samples repeat", found, "count the distinct ones, and split by them")
    if measured["dimensions"] is not None and measured["dimensions"] < FEW_DIMENSIONS:
        found = f"initial states lie on a set of about {measured['dimensions']:.1f} dimensions"
        yield Finding("few dimensions", found, "a table of samples solves this; vary more in the initial states")
    if measured["lookup_nrmse"] < EASY_LOOKUP:
        found = f"the nearest training sample scores an nRMSE of {measured['lookup_nrmse']:.2g}"
        yield Finding("a look-up is enough", found, "report it beside the model's, and generate data that vary more")
    if measured["drift"] is not None and measured["drift"] > DRIFT:
        found = f"a mean over space moves by {measured['drift']:.1%} of the field's spread"
        yield Finding("not conserved", found, "do not train with lambda_conservation")
    if measured["steady_nrmse"] is not None and measured["steady_nrmse"] > UNSTEADY:
        found = f"the steady solution itself scores an nRMSE of {measured['steady_nrmse']:.2g}"
        yield Finding("not steady", found, "look at the median: from the inputs alone no mean can be much better")
    for name, (said, fitted) in measured["coefficients"].items():
        if abs(fitted - said) > OFF * abs(said):
            found = f"{name} is {said:g} by name, and {fitted:.3g} by the fields"
            yield Finding("another coefficient", found, "judge physics terms and other solvers by the fitted one")
