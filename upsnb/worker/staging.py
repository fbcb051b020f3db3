"""How a run goes from stage to stage: where it begins, what a stage leaves behind, and whether that has paid."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import torch

from upsnb.config import RunConfig
from upsnb.models.perturbed import Perturbed
from upsnb.models.surrogate import Surrogate
from upsnb.runs import runfolder
from upsnb.runs.runfolder import EventWriter
from upsnb.spans import outside_step
from upsnb.training import checkpoint, evaluation, gates, parallel, stages
from upsnb.training.parallel import Ranks
from upsnb.training.setup import Setup


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


def where_to_begin(setup: Setup, folder: Path, following: str) -> dict[str, torch.Tensor]:
    """Weights for the stage after this one: the operator's or a teacher's, so that what follows it can be compared.

    This stage's own where those are not there: they stay behind when a run goes on from a mirror of its checkpoints.
    """
    wanted = stages.begins_with(following)
    return gates.kept(folder, wanted if gates.is_kept(folder, wanted) else setup.stage)


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
                model, *judged, first, lambda some: gates.compared(some, control, bar)["verdict"] != gates.HARM
            )
            if gates.draws(found) and gates.is_single(control):
                perturbed = Perturbed(ended(setup, folder, against), gates.errors_of_one_call(control))
                beside = evaluation.evaluate_ensembles(perturbed, *judged, first, lambda some: False)
        if ranks.rank == 0:  # in here, where averaged weights stand in the model
            weights = {name: value.cpu() for name, value in model.state_dict().items()}
            gates.keep(folder, setup.stage, weights, found)
    if ranks.rank == 0:
        if against:
            said = gates.compared(found, control, bar) | gates.beside(found, beside)
            verdict, spent_s = said["verdict"], round(time.perf_counter() - began, 3)
            events.write("gate", step, against=against, duration_s=spent_s, **said)
        gates.note(folder, setup.stage, verdict)
    parallel.barrier(ranks)
    return gates.answering(folder)
