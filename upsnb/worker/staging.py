"""How a run goes from stage to stage: where it begins, what a stage leaves behind, and whether that has paid."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import numpy as np
import torch

from upsnb.config import RunConfig
from upsnb.data.batch import Microbatch
from upsnb.data.batches import PairReader
from upsnb.data.datasets import Dataset
from upsnb.models.perturbed import Perturbed
from upsnb.models.surrogate import Surrogate
from upsnb.runs import runfolder
from upsnb.runs.runfolder import EventWriter
from upsnb.spans import outside_step
from upsnb.training import checkpoint, evaluation, frozen, gates, parallel, stages
from upsnb.training.parallel import Ranks
from upsnb.training.setup import Setup

FORECASTS = "forecasts"  # of a frozen model, while a stage needs them, beside what stages have ended with


def first_stage(config: RunConfig, folder: Path, ranks: Ranks) -> str:
    """The stage that a launch begins in: the latest checkpoint's, else the first; all ranks enter."""
    names = config.stages.planned
    if len(names) == 1 or not config.checkpoint.resume:
        return names[0]
    state = checkpoint.load(folder, ranks=ranks, allocate=lambda *_: None)
    return state["position"]["stage"] if state else names[0]


def ended(setup: Setup, folder: Path, stage: str) -> Surrogate:
    """The model of a stage that has ended, on this rank's device."""
    model = stages.build(setup.config, setup.datasets, stage).model.to(setup.ranks.device)
    model.load_state_dict(gates.kept(folder, stage))
    return model.eval()


def perturbed(model: Surrogate, found: Mapping[str, Mapping]) -> Iterator[Perturbed]:
    """The cheapest ensembles of a model that draws nothing, by what was found of it: with noise of a few sizes."""
    for times in gates.NOISES:
        sizes = {name: times * error for name, error in gates.errors_of_one_call(found).items()}
        yield Perturbed(model, sizes).to(next(model.parameters()).device)


def where_to_begin(setup: Setup, folder: Path, following: str) -> dict[str, torch.Tensor]:
    """Weights for the stage after this one: the operator's or a teacher's, so that what follows it can be compared.

    This stage's own where those are not there: they stay behind when a run goes on from a mirror of its checkpoints.
    """
    wanted = stages.begins_with(following)
    return gates.kept(folder, wanted if gates.is_kept(folder, wanted) else setup.stage)


@outside_step
def keep_forecasts(setup: Setup, folder: Path, log: Callable[[str], None]) -> dict[str, dict]:
    """Let a stage that calls a frozen model read its forecasts, where that is faster; all ranks enter, rank 0 computes.

    Returns:
        by dataset {"on", "why" not, "seen" how often each pair will be asked for, "compute_ms" and "read_ms" of a row,
        "gib", "build_s"}; nothing where a stage calls no frozen model.
    """
    objective, config, ranks, said = setup.objective, setup.config, setup.ranks, {}
    if getattr(stages.settings(config, setup.stage), "cache", "off") == "off":
        return {}
    places, place, pairs = {}, folder / runfolder.STAGES / FORECASTS, setup.loader.schedule.pairs
    with evaluation.evaluation_model(setup) as model, torch.compiler.set_stance("force_eager"), torch.no_grad():
        weights = model.before.state_dict() if ranks.rank == 0 else {}
        for name, dataset in setup.datasets.items() if ranks.rank == 0 else ():
            said[name], places[name] = _forecasts(
                setup, model.before, dataset, place, frozen.key(weights, pairs[name].tobytes()), log
            )
    said, places = parallel.all_gather_objects(ranks, (said, places))[0]
    objective.forecasts = {
        name: frozen.PairRows(frozen.Rows(path), pairs[name]) for name, path in places.items() if path is not None
    }
    return said


def _forecasts(
    setup: Setup, model: Surrogate, dataset: Dataset, folder: Path, of: str, log
) -> tuple[dict, Path | None]:
    """What a cache of one dataset's forecasts would cost, and where it is if it pays."""
    if dataset.augment:
        return {"on": False, "why": "each pair is shown in random images, another one each time"}, None
    name, config, device = dataset.name, setup.config, setup.ranks.device
    pairs, size = setup.loader.schedule.pairs[name], config.evaluation.samples_per_call
    reader = PairReader({name: dataset}, setup.loader.calls)

    def compute(numbers: np.ndarray) -> torch.Tensor:
        chosen = pairs[numbers]
        batch = reader[Microbatch(name, chosen, np.zeros(chosen.shape), 0, 0)].map(lambda x: x.to(device))
        return model.predict(name, *model.normalised(name, batch.inputs, batch.parameters, dataset.dt)).float()

    costs = frozen.tried(compute, len(pairs), size, folder, device)
    seen, limit = stages.settings(config, setup.stage).epochs, config.limit_s(setup.stage)
    if limit:  # a step costs about four forward passes of the frozen model, its own among them
        seen = min(seen, limit * setup.ranks.world_size / (4 * costs.compute_s * len(pairs)))
    why, path = costs.against(seen, frozen.free_bytes(folder)), frozen.place(folder, name, of)
    known = {"seen": round(seen, 1), "gib": round(costs.nbytes / 2**30, 4)}
    known |= {"compute_ms": round(1e3 * costs.compute_s, 4), "read_ms": round(1e3 * costs.read_s, 4)}
    if why and not path.exists():
        return {"on": False, "why": why, **known}, None
    began = time.perf_counter()
    frozen.discard_others(path)
    frozen.build(path, compute, len(pairs), size, log)
    return {"on": True, "why": "", **known, "build_s": round(time.perf_counter() - began, 3)}, path


@outside_step
def conclude(setup: Setup, folder: Path, events: EventWriter, step: int, alive: Callable[[], None]) -> str | None:
    """Keep what a stage ends with, and say whether it has paid; all ranks enter.

    Returns:
        the stage that answers for the run now; None where there is only one.
    """
    config, ranks = setup.config, setup.ranks
    if len(config.stages.planned) == 1:
        return None
    against, began, verdict = gates.control(config, setup.stage, folder), time.perf_counter(), ""
    with evaluation.evaluation_model(setup) as model, torch.compiler.set_stance("force_eager"):
        judged, bar = (setup.datasets, "validation", config.evaluation, ranks, alive), gates.bar(setup.stage)
        if against is None:
            found = evaluation.evaluate_ensembles(model, *judged)
        else:
            control, beside = runfolder.measured(folder, against), {}
            first = gates.first_look({name: dataset.splits["validation"] for name, dataset in setup.datasets.items()})
            found = evaluation.evaluate_ensembles(
                model, *judged, first, lambda some: not gates.harms(some, control, bar)
            )
            if gates.draws(found) and gates.is_single(control):
                noised = perturbed(ended(setup, folder, against), control)
                tried = (evaluation.evaluate_ensembles(one, *judged, first, lambda some: False) for one in noised)
                beside = gates.best(list(tried))
        if ranks.rank == 0:  # in here, where averaged weights stand in the model
            weights = {name: value.cpu() for name, value in model.state_dict().items()}
            gates.keep(folder, setup.stage, weights, found)
    if ranks.rank == 0:
        if against:
            said = gates.compared(found, control, bar) | gates.beside(found, beside)
            verdict, spent_s = said["verdict"], round(time.perf_counter() - began, 3)
            events.write("gate", step, against=against, duration_s=spent_s, **said)
        gates.note(folder, setup.stage, verdict)
        if stages.following(config, setup.stage) not in stages.TEACHERS:  # a student calls the same frozen model
            shutil.rmtree(folder / runfolder.STAGES / FORECASTS, ignore_errors=True)
    parallel.barrier(ranks)
    return gates.answering(folder)
