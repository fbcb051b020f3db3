"""What each stage of a run made of its model: a table of verdicts, and figures; needs no model.

From what was measured at the end of each stage, on the validation split: the test split is for the stage that answers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from upsnb.config import RunConfig
from upsnb.data.families import family_of
from upsnb.report import plots, results
from upsnb.report.figures import floats
from upsnb.report.file import number, verdict
from upsnb.report.style import save_all
from upsnb.runs import runfolder
from upsnb.runs.handle import Run

OF = "mean of {} trajectories of the validation split"
COLUMNS = (  # of the table, though nothing was measured: a run may be stopped before
    *("dataset", "stage", "trained [s]", "steps", "samples", "CRPS", "nRMSE of the mean", "correlated for"),
    *("spread / skill", "forecast [ms]", "verdict", "answers"),
)


@dataclass(frozen=True)
class Stages:
    """The stages of one run that have ended, in their order."""

    folder: Path
    config: RunConfig
    trained: dict[str, dict]  # by stage: steps, seconds and gate, as the report has them
    found: dict[str, dict[str, dict]]  # by dataset and stage, as of `evaluation.evaluate_ensembles`
    answers: str | None  # the stage whose model answers for the run

    @classmethod
    def of(cls, run: Run) -> Stages:
        least = 1 if run.config.stages.planned[1:] else 2  # one that was stopped in its first stage has that
        trained = {known["stage"]: known for known in results.stages(run.events(), least)}
        measured = {stage: runfolder.measured(run.folder, stage) for stage in trained}
        names = dict.fromkeys(name for found in measured.values() for name in found)
        found = {name: {s: measured[s][name] for s in measured if name in measured[s]} for name in names}
        return cls(run.folder, run.config, trained, found, run.manifest.get("answers"))

    def table(self) -> pd.DataFrame:
        """One row a dataset and stage: what it was trained for, what that is worth, and the verdict."""
        rows = []
        for name, stages in self.found.items():
            for stage, known in stages.items():
                trained, gate = self.trained[stage], self.trained[stage]["gate"]
                rows.append(
                    {
                        "dataset": name,
                        "stage": stage,
                        "trained [s]": number(trained["train_time_s"], 3),
                        "steps": number(trained["steps"]),
                        "samples": number(len(known["samples"])),
                        "CRPS": number(known["crps"], 3),
                        "nRMSE of the mean": number(known["mean_nrmse"], 3),
                        "correlated for": number(known.get("correlation_time"), 3),
                        "spread / skill": number(known["spread_skill"], 2) if known["members"] > 1 else "",
                        "forecast [ms]": number(1e3 * known["forecast_s"], 3),
                        "verdict": verdict(gate) if gate else "",
                        "answers": "yes" if stage == self.answers else "",
                    }
                )
        return pd.DataFrame(rows, columns=COLUMNS).set_index(["dataset", "stage"])

    @property
    def moving(self) -> list[str]:
        """Datasets that have a time to forecast over."""
        return [name for name, stages in self.found.items() if any("times" in known for known in stages.values())]

    @property
    def drawn(self) -> list[tuple[str, str]]:
        """(dataset, stage) of those whose models draw ensembles."""
        return [(n, stage) for n, stages in self.found.items() for stage in stages if stages[stage]["members"] > 1]

    def crps(self, name: str) -> Figure:
        """CRPS as the forecast goes on, a curve a stage."""
        stages = self.found[name]
        curves = {stage: floats(known["per_time"]["crps"]) for stage, known in stages.items()}
        told = ", ".join(f"{stage} {number(known['crps'], 3)}" for stage, known in stages.items())
        count = len(next(iter(stages.values()))["samples"])
        return plots.rollout_error(
            next(iter(stages.values()))["times"],
            curves,
            quantity="CRPS [standard deviations]",
            title=f"{name}: CRPS of {told}; {OF.format(count)}",
        )

    def correlation(self, name: str) -> Figure:
        """Correlation of the members' mean with the truth as the forecast goes on."""
        stages = self.found[name]
        told = ", ".join(
            f"{stage} {number(known['correlation_time'], 3)}{'' if known['correlation_lost'] else ' or more'}"
            for stage, known in stages.items()
        )
        curves = {stage: floats(known["per_time"]["correlation"]) for stage, known in stages.items()}
        title = f"{name}: correlated with the truth by 0.8 or more for {told}"
        return plots.correlations(next(iter(stages.values()))["times"], curves, title=title)

    def spectrum(self, name: str) -> Figure:
        """Energy by wavenumber at the last time, of the truth and of one forecast of each stage."""
        stages, family = self.found[name], family_of(self.config.data.datasets[name])
        spectra = {stage: known["spectrum"] for stage, known in stages.items()}
        first = next(iter(spectra.values()))
        wavenumber, truth = floats(first["wavenumber"]), floats(first["truth"])
        curves = {stage: floats(each["members"]) for stage, each in spectra.items()}
        told = ", ".join(f"{stage} {_alike(wavenumber, truth, energy)}" for stage, energy in curves.items())
        title = f"{name}, at the last time: a forecast's energy is half to twice the truth's up to wavenumber: {told}"
        quantity = f"{family.output_channels[0]} [standard deviations]"
        return plots.spectra(wavenumber, {"truth": truth, **curves}, quantity=quantity, title=title)

    def calibration(self, name: str, stage: str) -> Figure:
        """Whether an ensemble is as wide as it errs: spread beside error as the forecast goes on, and ranks."""
        known = self.found[name][stage]
        held = ", ".join(
            f"the central {share.replace('%', ' %')} of the members hold {100 * value:.0f} % of the truth"
            for share, value in known["coverage"].items()
            if value is not None
        )
        title = f"{name}, {known['members']} members of {stage}: spread over skill {number(known['spread_skill'], 2)}"
        per_time = known["per_time"]
        times = known.get("times", range(len(per_time["spread"])))
        spread, error = (floats(per_time[key]) for key in ("spread", "mean_rmse"))
        return plots.calibration(times, spread, error, floats(known["rank_histogram"]), title=f"{title}; {held}")

    def cost(self, name: str) -> Figure:
        """CRPS over the time that a forecast takes, a dot a stage."""
        stages = self.found[name]
        cost = {stage: 1e3 * known["forecast_s"] for stage, known in stages.items()}
        told = ", ".join(f"{stage} {number(value, 3)} ms" for stage, value in cost.items())
        quality = {stage: known["crps"] for stage, known in stages.items()}
        members = max(known["members"] for known in stages.values())
        title = f"{name}, a whole forecast of one sample, {members} members where they are drawn: {told}"
        return plots.cost(cost, quality, "CRPS [standard deviations]", title=title)

    def all(self) -> dict[str, Callable[[], Figure]]:
        """Every figure there is, by file name."""
        drawings: dict[str, Callable[[], Figure]] = {}
        for name in self.moving:
            drawings |= {
                f"crps_{name}": partial(self.crps, name),
                f"correlation_{name}": partial(self.correlation, name),
            }
        for name, stage in self.drawn:
            drawings[f"calibration_{name}_{stage}"] = partial(self.calibration, name, stage)
        for name in self.found:
            drawings |= {
                f"stages_spectrum_{name}": partial(self.spectrum, name),
                f"cost_{name}": partial(self.cost, name),
            }
        return drawings

    def write_figures(self) -> dict[str, Path]:
        """Write all of them into the run folder's `figures/`; figure name -> PNG."""
        return save_all({name: draw() for name, draw in self.all().items()}, self.folder)


def _alike(wavenumber: np.ndarray, truth: np.ndarray, energy: np.ndarray) -> int:
    """The last wavenumber before the first whose energy is not half to twice the truth's."""
    off = (wavenumber > 0) & ~((energy >= truth / 2) & (energy <= 2 * truth))
    return int(wavenumber[off][0] if off.any() else wavenumber[-1] + 1) - 1
