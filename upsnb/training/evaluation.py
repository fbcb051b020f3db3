"""How good the model is: PDEBench's metrics over a whole split, one call and rollout, beside a baseline.

Always in float32, without TensorFloat-32: a metric must not depend on how fast the training step was made.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from upsnb.config import EvaluationConfig
from upsnb.data import audit, symmetries
from upsnb.data.datasets import Dataset
from upsnb.data.source import thinned
from upsnb.models.network import evaluating
from upsnb.models.surrogate import Surrogate
from upsnb.runs.files import replacing
from upsnb.training import ensembles, metrics, parallel, precision, stages
from upsnb.training.parallel import Ranks
from upsnb.training.setup import Setup
from upsnb.training.workload import write_results

READ_AGAIN = 16  # samples of a split, evenly from all over it, by whose values it is known, and that are solved
REFERENCES = ("lookup", "training_mean")  # forecasts without a model beside the baseline, in a last evaluation


@contextmanager
def evaluation_model(setup: Setup) -> Iterator[Surrogate]:
    """The model as it is evaluated: in evaluation mode, with averaged weights where they are kept, whole on every rank.

    Sharded weights are gathered once, in float32, into a model of this rank's own: 0.09 GB for the 21.4 M parameters of
    the published recipe, freed afterwards. Its calls are no collectives, so ranks may have any number of samples each,
    and one rank may go on alone. All ranks enter.
    """
    if setup.ema is not None:
        setup.ema.swap()
    try:
        model = setup.model
        if setup.config.training.use_fsdp2:
            model = stages.build(setup.config, setup.datasets, setup.stage).model.to(setup.ranks.device)
            model.load_state_dict(parallel.gather_full(setup.model.state_dict()))
        with precision.highest(), evaluating(model):
            yield model
    finally:
        if setup.ema is not None:
            setup.ema.swap()


@torch.no_grad()
def evaluate(
    model: Surrogate,
    datasets: dict[str, Dataset],
    split: str,
    config: EvaluationConfig,
    ranks: Ranks,
    alive: Callable[[], None] = lambda: None,
    fraction: float = 1.0,
    lookup: bool = False,
) -> dict[str, dict]:
    """Metrics of every dataset on one split; all ranks enter, each takes a share of the samples.

    Args:
        model: in evaluation mode.
        alive: called between chunks of samples, so that a long evaluation is not taken for a hang.
        fraction: share of the split's samples that is measured, the same ones each time.
        lookup: score as well the trajectory of the training sample that begins most alike, and the mean training
            trajectory, where there is such a sample.
    Returns:
        {dataset: {"num_samples", "nrmse_mean", ... one call, "rollout_...": to the trajectory's end, "baseline",
        "per_sample": {...}, "per_channel": {...}, "per_time": {...}}}, the same on every rank. Where the split
        leaks, "leak": how many samples begin as a training sample does, how many nearly so, and "distinct", all those
        numbers of the others; null if there are none.
    """
    results = {}
    for name, dataset in datasets.items():
        chosen = spread(np.arange(len(dataset.splits[split])), fraction)
        if len(chosen) == 0:
            continue
        samples, twins, distance = (some[chosen] for some in (dataset.splits[split], *dataset.twins(split)))
        looked_up = twins if lookup and np.isfinite(distance).all() else twins[:0]
        share, twins = (some[ranks.rank :: ranks.world_size] for some in (samples, looked_up))
        kinds = ("model", "baseline", "rollout", "rollout_baseline", *REFERENCES)
        parts: dict[str, list] = {kind: [] for kind in kinds}
        for start in range(0, len(share), config.samples_per_call):
            alive()
            chosen, known = (some[start : start + config.samples_per_call] for some in (share, twins))
            index = torch.from_numpy(chosen)
            for kind, forecast, truth in _forecasts(model, dataset, chosen, known, config, ranks.device):
                parts[kind].append(metrics.sample_statistics(forecast.cpu(), truth.cpu(), index))
        gathered = parallel.all_gather_objects(ranks, parts)
        merged = {kind: [p for rank in gathered for p in rank[kind]] for kind in parts}
        results[name] = _summary(dataset, samples, merged, distance)
    return results


def spread(samples: np.ndarray, fraction: float) -> np.ndarray:
    """That share of samples, evenly from all over them; one at least, where there are any."""
    return thinned(samples, max(1, round(fraction * len(samples))))


def _forecasts(model, dataset, chosen, twins, config, device) -> Iterator[tuple]:
    """(kind, forecast, truth) of some samples, in physical units."""
    spec = dataset.spec
    inputs, targets, parameters = read_samples(dataset, chosen, device)
    given, rest = given_and_rest(dataset, inputs, targets)
    if len(twins):
        yield "lookup", given_and_rest(dataset, *read_samples(dataset, twins, device)[:2])[1], rest
        if spec.time_dependent:  # elsewhere it is the baseline
            yield "training_mean", torch.from_numpy(dataset.training_mean)[dataset.given_frames :].expand_as(rest), rest
    if not spec.time_dependent:
        yield "model", predict(model, dataset, inputs, parameters, config.symmetry_average), targets
        yield "baseline", torch.from_numpy(dataset.training_mean).expand_as(targets), targets
        return
    # one call from every start that leaves no gap and no overlap between forecasts, joined along time
    starts = range(0, inputs.shape[1] - spec.input_frames - spec.output_frames + 1, spec.output_frames)
    windows = [inputs[:, first : first + spec.input_frames] for first in starts]
    forecast = torch.cat([predict(model, dataset, window, parameters) for window in windows], dim=1)
    held = [metrics.persistence(targets[:, : spec.input_frames + n], spec.output_frames) for n in starts]
    truth = targets[:, spec.input_frames :][:, : forecast.shape[1]]
    yield "model", forecast, truth
    yield "baseline", torch.cat(held, dim=1), truth
    if config.rollout:
        num_frames = rest.shape[1]
        yield "rollout", model.rollout(dataset.name, given, parameters, dataset.dt, num_frames), rest
        yield "rollout_baseline", metrics.persistence(targets[:, : dataset.given_frames], num_frames), rest


@torch.no_grad()
def evaluate_ensembles(
    model: Surrogate,
    datasets: dict[str, Dataset],
    split: str,
    config: EvaluationConfig,
    ranks: Ranks,
    alive: Callable[[], None] = lambda: None,
    first: int | None = None,
    go_on: Callable[[dict[str, dict]], bool] = lambda found: True,
) -> dict[str, dict]:
    """What rollouts are worth that a model draws, `config.members` of each sample; all ranks enter.

    A model that draws nothing is an ensemble of one, whose CRPS is its mean absolute error. No more than
    `config.samples_per_call` forecasts are computed at a time.

    Args:
        model: in evaluation mode.
        first: so many samples of each dataset, evenly from all over it, before the others; None: all at once.
        go_on: whether to look at the others too, given what was found of the first ones; the same on every rank.
    Returns:
        {dataset: as of `ensembles.reduce`, and "samples", "forecast_s" of all members of one; where there is a time,
        "times" and the "correlation_time" of the members' mean}
    """
    results, parts = {}, {name: [] for name in datasets}
    known: dict[str, list[int]] = {name: [] for name in datasets}
    spent_s: dict[str, list[float]] = {name: [] for name in datasets}
    for is_first in (True, False) if first else (False,):
        for name, dataset in datasets.items():
            samples = dataset.splits[split]
            samples = thinned(samples, first) if is_first else np.setdiff1d(samples, known[name])
            shares = [samples[rank :: ranks.world_size] for rank in range(ranks.world_size)]
            own = _ensemble_parts(model, dataset, shares[ranks.rank], config, ranks.device, spent_s[name], alive)
            parts[name] += [part for rank in parallel.all_gather_objects(ranks, own) for part in rank]
            known[name] += np.concatenate(shares).tolist()
            if parts[name]:
                results[name] = _ensemble_summary(dataset, parts[name], known[name], spent_s[name])
        if is_first and not go_on(results):
            break
    return results


def _ensemble_parts(model, dataset, samples, config, device, spent_s: list[float], alive) -> list[dict]:
    """Statistics of some samples' ensembles; adds to `spent_s` how long one took, with all its members."""
    members, parts = config.members if model.draws else 1, []
    at_once, scale = max(1, config.samples_per_call // members), torch.tensor(dataset.spec.output_std)
    for start in range(0, len(samples), at_once):
        alive()
        chosen = samples[start : start + at_once]
        inputs, targets, parameters = read_samples(dataset, chosen, device)
        given, truth = given_and_rest(dataset, inputs, targets)
        began = time.perf_counter()
        drawn = model.ensemble(dataset.name, given, parameters, dataset.dt, truth.shape[1], members, chosen).cpu()
        spent_s.append((time.perf_counter() - began) / len(chosen))
        parts.append(ensembles.sample_statistics(drawn, truth.cpu(), scale))
    return parts


def _ensemble_summary(dataset: Dataset, parts: list[dict], samples: list[int], spent_s: list[float]) -> dict:
    found = ensembles.reduce(parts) | {"samples": list(samples), "forecast_s": float(np.median(spent_s or [math.nan]))}
    if dataset.spec.time_dependent:
        times, until = _forecast_times(dataset)
        lasts, lost = metrics.correlation_time(times, found["per_time"]["correlation"], until)
        found |= {"times": times.tolist(), "correlation_time": lasts, "correlation_lost": lost}
    return found


def read_samples(dataset: Dataset, samples: np.ndarray, device) -> tuple[Tensor, Tensor, Tensor]:
    """Whole trajectories: inputs (B, T, C, *grid), targets, parameters (B, P), physical units, on the device."""
    inputs, targets = map(torch.from_numpy, dataset.source.read(samples, dataset.frames))
    parameters = torch.from_numpy(dataset.source.parameters[samples])
    inputs = inputs.to(device)
    targets = inputs[:, :, : targets.shape[2]] if dataset.spec.time_dependent else targets.to(device)
    return inputs, targets, parameters.to(device)


def given_and_rest(dataset: Dataset, inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """What a rollout is given of whole trajectories, and what it is to forecast."""
    if not dataset.spec.time_dependent:
        return inputs, targets
    return inputs[:, : dataset.given_frames], targets[:, dataset.given_frames :]


def predict(model: Surrogate, dataset: Dataset, inputs, parameters, symmetry_average=False) -> Tensor:
    """One call, physical units; on request averaged over the equation's symmetries, where they are few."""
    if symmetry_average and "turn" in dataset.family.symmetries and dataset.source.mirrors:
        return symmetries.average(dataset.family, lambda x: model(dataset.name, x, parameters, dataset.dt), inputs)
    return model(dataset.name, inputs, parameters, dataset.dt)


def _summary(dataset: Dataset, samples: np.ndarray, merged: dict[str, list], distance: np.ndarray) -> dict:
    statistics = {kind: metrics.concatenate(parts) for kind, parts in merged.items() if parts}
    energy = statistics.get("rollout", statistics["model"])["energy"].double().mean(0)[:, 0].tolist()
    summary = {
        **_scores(dataset, statistics),
        "per_sample": {"samples": samples.tolist(), "nrmse": metrics.nrmse_per_sample(statistics["model"]).tolist()},
        "per_channel": {"nrmse": _by_channel(dataset, statistics["model"])},
        "per_time": {},
        "spectrum": {  # of the first channel at the last frame, mean over all samples
            "wavenumber": list(range(len(energy[0]))),
            **dict(zip(("truth", "prediction", "error"), energy, strict=True)),
        },
    }
    if "rollout" in statistics:
        times, until = _forecast_times(dataset)
        rollout, persisted = statistics["rollout"], statistics["rollout_baseline"]
        summary["per_channel"]["rollout_nrmse"] = _by_channel(dataset, rollout)
        summary["per_sample"]["rollout_nrmse"] = metrics.nrmse_per_sample(rollout).tolist()
        summary["per_sample"]["rollout_persistence_nrmse"] = metrics.nrmse_per_sample(persisted).tolist()
        summary["per_time"] = {
            "time": times.tolist(),
            "given_until": until,
            "correlation": metrics.correlation_per_time(rollout).tolist(),
            "rollout_nrmse": metrics.nrmse_per_time(rollout).tolist(),
            "rollout_nrmse_quartiles": _quartiles(rollout),
            "persistence_nrmse": metrics.nrmse_per_time(persisted).tolist(),
        }
    if audit.leaks(distance):
        near = distance <= audit.NEAR
        apart = {kind: {key: value[~near] for key, value in found.items()} for kind, found in statistics.items()}
        seen = int((distance <= audit.SAME).sum())
        distinct = None if near.all() else _scores(dataset, apart)
        summary["leak"] = {"seen": seen, "near": int(near.sum()), "distinct": distinct}
    return summary


def _scores(dataset: Dataset, statistics: dict[str, dict[str, Tensor]]) -> dict:
    """What is one number over all samples of these statistics, by kind."""
    static = not dataset.spec.time_dependent
    size = math.prod(high - low for low, high in dataset.family.domain)
    reduced = {kind: metrics.reduce(found, size) for kind, found in statistics.items()}
    forecast = "training mean" if static else "persistence"  # without a model, which scores stand beside
    baseline, rolled = f"{'baseline' if static else 'persistence'}_nrmse_mean", "" if static else "rollout_"
    references = {f"{rolled}{kind}_nrmse_mean": reduced[kind]["nrmse_mean"] for kind in REFERENCES if kind in reduced}
    scores = {
        "num_samples": len(statistics["model"]["error_square"]),
        "baseline": forecast,
        **reduced["model"],
        baseline: reduced["baseline"]["nrmse_mean"],
        **references,
    }
    if "rollout" in reduced:
        scores |= {f"rollout_{key}": value for key, value in reduced["rollout"].items()}
        scores[f"rollout_{baseline}"] = reduced["rollout_baseline"]["nrmse_mean"]
        times, until = _forecast_times(dataset)
        correlations = metrics.correlation_per_time(statistics["rollout"])
        lasts, lost = metrics.correlation_time(times, correlations, until)
        scores |= {"rollout_correlation_time": lasts, "rollout_correlation_lost": lost}
    return scores


def _forecast_times(dataset: Dataset) -> tuple[np.ndarray, float]:
    """Times of the frames that a rollout forecasts, and of the last one that it is given."""
    times = dataset.source.times[dataset.frames]
    return times[dataset.given_frames :], float(times[dataset.given_frames - 1])


def _by_channel(dataset: Dataset, statistics: dict[str, Tensor]) -> dict[str, float]:
    """Mean nRMSE of each channel, over samples and frames."""
    return dict(zip(dataset.family.channels, metrics.nrmse(statistics).mean((0, 1)).tolist(), strict=True))


def _quartiles(statistics: dict[str, Tensor]) -> list[list[float]]:
    """25 % and 75 % over samples, per frame."""
    per_frame = metrics.nrmse(statistics).mean(dim=2).float()
    return torch.quantile(per_frame, torch.tensor([0.25, 0.75]), dim=0).tolist()


def write(folder: Path, results: dict[str, dict], datasets: dict[str, Dataset], split: str, weights: str) -> None:
    """Write evaluation.json: the results of a split, and for each dataset what they stand on."""
    whole = {
        name: {**result, **floor(datasets[name], split), "protocol": protocol(datasets[name], split)}
        for name, result in results.items()
    }
    write_results(folder, whole, split, weights)


def protocol(dataset: Dataset, split: str) -> dict[str, str | int]:
    """What scores must have in common to be compared: the very samples, what was given of them, what was trained on.

    Data are known by their values, whatever the file's name: those of READ_AGAIN samples of the split, and the training
    split's statistics.
    """
    samples, spec = dataset.splits[split], dataset.spec
    digest = hashlib.sha256(np.asarray(samples, np.int64).tobytes() + dataset.source.parameters[samples].tobytes())
    for sample in thinned(samples, READ_AGAIN):
        for fields in dataset.source.read(sample, dataset.frames):
            digest.update(fields.tobytes())
    moments = ((spec.input_mean, spec.input_std), (spec.output_mean, spec.output_std))
    said = ", ".join(f"{mean:.5g} +- {std:.5g}" for side in moments for mean, std in zip(*side))
    given = dataset.given_frames if spec.time_dependent else 0
    return {
        "metrics": metrics.VERSION,
        "split": split,
        "samples": len(samples),
        "data": digest.hexdigest()[:16],
        "frames given": given,
        "frames forecast": len(dataset.frames) - given,
        "training data": f"{len(dataset.splits['train'])} samples, {said}",
    }


def floor(dataset: Dataset, split: str) -> dict[str, float]:
    """Where a family has one, nRMSE of the exact steady solution: what stored fields leave to no model to explain."""
    if not audit.has_steady(dataset.source):
        return {}
    return {"floor_nrmse_mean": audit.steady_nrmse(dataset.source, thinned(dataset.splits[split], READ_AGAIN))}


@torch.no_grad()
def save_examples(
    path: Path,
    model: Surrogate,
    datasets: dict[str, Dataset],
    results: dict[str, dict],
    config: EvaluationConfig,
    device: torch.device,
    ranked: bool = True,
) -> None:
    """Forecast and truth of some samples of each dataset, as one .npz file that is whole whenever it is read.

    Args:
        model: in evaluation mode.
        ranked: those from the best to the worst; otherwise one, the first that was measured, the same each time.
    """
    arrays: dict[str, np.ndarray] = {}
    for name, result in results.items():
        dataset = datasets[name]
        scores = np.asarray(result["per_sample"].get("rollout_nrmse", result["per_sample"]["nrmse"]))
        ranking = np.argsort(scores)
        count = min(config.num_examples, len(ranking))
        picks = ranking[np.unique(np.linspace(0, len(ranking) - 1, count).round().astype(int))] if ranked else [0]
        samples = np.asarray(result["per_sample"]["samples"])[picks]
        inputs, targets, parameters = read_samples(dataset, samples, device)
        given, truth = given_and_rest(dataset, inputs, targets)
        if dataset.spec.time_dependent:
            forecast = model.rollout(name, given, parameters, dataset.dt, truth.shape[1])
        else:
            forecast = predict(model, dataset, given, parameters, config.symmetry_average)
        arrays |= {
            f"{name}/inputs": given.cpu().numpy(),
            f"{name}/truth": truth.cpu().numpy(),
            f"{name}/forecast": forecast.cpu().numpy(),
            f"{name}/nrmse": scores[picks],
            f"{name}/samples": samples,
            f"{name}/times": dataset.source.times[dataset.frames],
        }
        for axis, values in zip("xyz", dataset.source.coordinates, strict=False):
            arrays[f"{name}/{axis}"] = values
    with replacing(path) as file:
        np.savez_compressed(file, **arrays)
