"""The next point of a search, by what the points before it came to: Optuna, an optional extra, says where to look."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence

SAMPLER, INSTALL = "optuna", ".venv/bin/pip install -c constraints.txt -e '.[optuna]'"
TRIES = 20  # for a point that was not there yet, where few values are left


def suggest(axes: Mapping[str, list | Mapping], known: Sequence[tuple[Mapping, float | None]]) -> dict | None:
    """A point to train next; None where all that it can think of are known. The same for the same points.

    Args:
        axes: values by setting, or {"from", "to", "log"}.
        known: points, and the error of each; None of one that failed.
    """
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    ranges = {path: _distribution(optuna.distributions, values) for path, values in axes.items()}
    points = [point for point, _ in known]
    for number in range(TRIES):
        sampler = optuna.samplers.TPESampler(n_startup_trials=1, seed=len(known) + 1000 * number)
        study = optuna.create_study(sampler=sampler)
        for point, error in known:
            state = optuna.trial.TrialState.FAIL if error is None else optuna.trial.TrialState.COMPLETE
            how = {"params": dict(point), "distributions": ranges, "value": error, "state": state}
            with contextlib.suppress(ValueError):  # it was drawn from other values
                study.add_trial(optuna.trial.create_trial(**how))
        asked = study.ask(ranges).params
        point = {path: rounded(asked[path], values) for path, values in axes.items()}
        if point not in points:
            return point
    return None


def _distribution(kinds, values: list | Mapping):
    if isinstance(values, list):
        return kinds.CategoricalDistribution(values)
    low, high = values["from"], values["to"]
    kind = kinds.IntDistribution if isinstance(low, int) and isinstance(high, int) else kinds.FloatDistribution
    return kind(low, high, log=values.get("log", False))


def rounded(value, values: list | Mapping):
    """With as many digits as anybody wants to read, between the ends of an interval."""
    if isinstance(values, list) or isinstance(value, int):
        return value
    return float(min(max(float(f"{value:.3g}"), values["from"]), values["to"]))
