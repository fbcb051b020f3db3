"""Whether a stage has paid: what it ends with against another stage on the validation split, sample by sample.

Each stage's weights stay in the run folder, `stages/<stage>.pt`: all stages after the first begin where that one ended,
and a run answers with the last stage that passed. The test split is not looked at.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from upsnb.config import OPERATOR, RunConfig
from upsnb.errors import RunError
from upsnb.runs import runfolder
from upsnb.runs.events import without_nonfinite
from upsnb.runs.files import replacing
from upsnb.runs.recovery import in_one_line
from upsnb.runs.throughput import NUM_RESAMPLES
from upsnb.training.stages import TEACHERS

FEWEST = 8  # validation samples that a verdict needs
AS_GOOD = 1.05  # of its teacher's error: a student is to be cheaper, not better
FIRST_SHARE = 0.25  # of them, by which a stage that has done much harm is found out
NOISES = (1, 3, 10)  # of perturbed frames, over the error of one call: the best is not known before
CHANCE = 0.1  # of harm that is none, by which a first look ends it [%]
PASS, NO_GAIN, HARM, NOT_MEASURABLE = "pass", "no gain", "harm", "not measurable"


def control(config: RunConfig, stage: str, folder: Path) -> str | None:
    """The stage that another one is measured against.

    The one before it: `finetune`, in as much time, is what the next must beat, whatever its verdict. Those after that
    must beat the one that answers by then, and a student its teacher.
    """
    names = config.stages.planned
    before = names[: names.index(stage)]
    if not before or stage in TEACHERS:
        return TEACHERS.get(stage)
    return before[-1] if before[-1] in (OPERATOR, "finetune") else answering(folder) or before[-1]


def bar(stage: str) -> float:
    """The ratio of errors below which a stage has paid."""
    return AS_GOOD if stage in TEACHERS else 1.0


def judge(found: Mapping[str, Sequence[float]], control: Mapping[str, Sequence[float]], bar: float = 1.0) -> dict:
    """The verdict on errors per sample, of one stage and of its control on the very same samples.

    Mean error over the control's, mean over datasets; its 95 % interval by a bootstrap over samples, both sides drawn
    together. Its draws have a seed: the same errors give the same.

    Args:
        found, control: by dataset.
        bar: of the ratio.
    Returns:
        {"verdict", "ratio", "ci95", "samples"}
    """
    pairs, drawn = _drawn(found, control)
    samples = min((pair.shape[1] for pair in pairs), default=0)
    if drawn is None:
        return {"verdict": NOT_MEASURABLE, "ratio": None, "ci95": [None, None], "samples": samples}
    low, high = np.percentile(drawn, (2.5, 97.5)).tolist()
    verdict = PASS if high < bar else HARM if low > bar else NO_GAIN
    ratio = float(np.mean([pair[0].mean() / pair[1].mean() for pair in pairs]))
    return {"verdict": verdict, "ratio": ratio, "ci95": [low, high], "samples": samples}


def _drawn(found: Mapping, control: Mapping) -> tuple[list[np.ndarray], np.ndarray | None]:
    """Errors of both sides, (2, samples) by dataset, and ratios of resampled ones; None where nothing can be said."""
    pairs = [np.array([found[name], control[name]], float) for name in found if name in control]
    if not pairs or len(pairs) < len(found) or min(pair.shape[1] for pair in pairs) < FEWEST:
        return pairs, None
    if not all(np.isfinite(pair).all() and pair[1].sum() > 0 for pair in pairs):
        return pairs, None
    draws, drawn = np.random.default_rng(0), np.zeros(NUM_RESAMPLES)
    for pair in pairs:
        rows = draws.integers(pair.shape[1], size=(NUM_RESAMPLES, pair.shape[1]))
        ours, theirs = (side[rows].mean(1) for side in pair)
        drawn += ours / theirs / len(pairs)
    return pairs, drawn


def answering(folder: Path) -> str | None:
    """The stage whose model answers for a run: the last one that passed, else the first.

    None where there are no weights of it: before a stage has ended, and where a run went on from a mirror.
    """
    stage = runfolder.read_manifest(folder).get("answers")
    return stage if stage and is_kept(folder, stage) else None


def note(folder: Path, stage: str, verdict: str) -> None:
    """Write down which stage answers from here on; of the first one no verdict is asked.

    A student that is as good as its teacher answers where that one did.
    """
    of_what_answers = stage not in TEACHERS or answering(folder) == TEACHERS[stage]
    if stage == OPERATOR or (verdict == PASS and of_what_answers):
        runfolder.update_manifest(folder, answers=stage)


def compared(found: Mapping[str, Mapping], control: Mapping[str, Mapping], bar: float = 1.0) -> dict:
    """The verdict on what `evaluate_ensembles` found of a stage and its control, on the samples that both have.

    By CRPS. A spread alone lowers it, so what passes must not have paid for that with its mean: no gain where the nRMSE
    of the members' mean is surely higher.

    Returns:
        as of `judge`, and "mean_ratio", of those nRMSE.
    """
    by_score, by_mean = (judge(*_paired(found, control, error), bar) for error in ("crps", "mean_nrmse"))
    traded = by_score["verdict"] == PASS and by_mean["verdict"] == HARM
    return by_score | {"verdict": NO_GAIN if traded else by_score["verdict"], "mean_ratio": by_mean["ratio"]}


def harms(found: Mapping[str, Mapping], control: Mapping[str, Mapping], bar: float = 1.0) -> bool:
    """Whether a first look at some of the samples may end it: by harm that 99.9 % of resampled ratios show.

    A first look that goes by 95 % gives chance a second opportunity to decide; what ends clinical trials before their
    time is one in a thousand (Haybittle 1971; Peto et al. 1976).
    """
    _, drawn = _drawn(*_paired(found, control, "crps"))
    return drawn is not None and bool(np.percentile(drawn, CHANCE) > bar)


def draws(found: Mapping[str, Mapping]) -> bool:
    """Whether what `evaluate_ensembles` found is of a model that draws."""
    return any(one["members"] > 1 for one in found.values())


def is_single(found: Mapping[str, Mapping]) -> bool:
    """Whether it is of one that does not, whose errors are known."""
    return bool(found) and not draws(found) and None not in errors_of_one_call(found).values()


def errors_of_one_call(found: Mapping[str, Mapping]) -> dict[str, float]:
    """By dataset, root mean square at the first time that is forecast [standard deviations]."""
    return {name: one["per_time"]["mean_rmse"][0] for name, one in found.items()}


def best(tried: Sequence[Mapping[str, Mapping]]) -> dict[str, Mapping]:
    """Of what `evaluate_ensembles` found of several models, that of the lowest CRPS, by dataset."""
    return {
        name: min((one[name] for one in tried), key=lambda one: np.nan_to_num(one["crps"], nan=np.inf))
        for name in tried[0]
    }


def beside(found: Mapping[str, Mapping], perturbed: Mapping[str, Mapping]) -> dict:
    """What of a gain in CRPS is not that of any ensemble: beside one that is no more than perturbed frames.

    Part of no verdict. Without it a single forecast would be all that an ensemble has had to beat.

    Returns:
        {"perturbed_ratio", "perturbed_ci95"} of their CRPS, on the samples that both have; None where there are none
    """
    said = judge(*_paired(found, perturbed, "crps"))
    return {f"perturbed_{key}": said[key] for key in ("ratio", "ci95")}


def _paired(found: Mapping[str, Mapping], control: Mapping[str, Mapping], error: str) -> list[dict[str, list]]:
    """An error of both, by dataset, of the same samples in one order."""
    sides = [
        {name: dict(zip(one["samples"], one["per_sample"][error], strict=True)) for name, one in side.items()}
        for side in (found, control)
    ]
    both = {name: sorted(sides[0][name].keys() & sides[1].get(name, {}).keys()) for name in found}
    return [{name: [side[name][sample] for sample in both[name]] for name in found if both[name]} for side in sides]


def first_look(datasets: Mapping[str, Sequence]) -> int:
    """How many samples of each dataset are looked at before all of them, where a stage may have done much harm.

    Args:
        datasets: the samples of each that are to judge.
    """
    return max(FEWEST, round(FIRST_SHARE * max(map(len, datasets.values()), default=0)))


def keep(folder: Path, stage: str, weights: Mapping[str, Tensor], found: Mapping[str, dict]) -> None:
    """Write what a stage ends with, whole and on the host: its measures, and in one step its weights.

    Args:
        found: of `evaluate_ensembles`, on the validation split.
    """
    path = folder / runfolder.STAGES / f"{stage}.pt"
    path.parent.mkdir(exist_ok=True)
    runfolder.write_json(path.with_suffix(".json"), without_nonfinite(found))
    with replacing(path) as file:
        torch.save(dict(weights), file)


def is_kept(folder: Path, stage: str) -> bool:
    """Whether there are any."""
    return (folder / runfolder.STAGES / f"{stage}.pt").exists()


def kept(folder: Path, stage: str) -> dict[str, Tensor]:
    """The weights that a stage ended with.

    Raises:
        RunError: they are not there, or cannot be read.
    """
    path = Path(folder) / runfolder.STAGES / f"{stage}.pt"
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        ended = sorted(each.stem for each in path.parent.glob("[!.]*.pt"))
        raise RunError(f"{path}: is not there -> choose one that has ended: {', '.join(ended) or 'none has'}") from None
    except Exception as error:  # whatever torch finds in a damaged file
        found = in_one_line(error)
        raise RunError(f"{path}: cannot be read ({found}) -> train the stage again") from None
