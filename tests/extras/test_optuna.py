"""A search by Optuna, in the environment that `make test` builds for it."""

import math

import pytest

from upsnb.compare import sweep
from upsnb.config import RunConfig

pytest.importorskip("optuna", reason="optuna is not here -> make test runs this in .extras")

ASKED = {"lr": {"from": 1e-4, "to": 1e-1, "log": True}, "depth": {"from": 2, "to": 9}, "num_heads": [2, 4]}


def test_optuna_looks_where_errors_are_small():
    planned = sweep.plan(RunConfig(), random=ASKED, draws=40, sampler="optuna")

    def error(point):  # smallest at a learning rate of 0.01 and a depth of 4; some points fail
        distance = abs(math.log10(point["optimizer.lr"]) + 2) + abs(point["operator.pdet.depth"] - 4) / 4
        return None if point["operator.pdet.depth"] == 9 else distance

    known = [(point, error(point)) for point in planned.points]
    while len(known) < planned.draws:
        point = sweep.suggest(planned.axes, known)
        assert point == sweep.suggest(planned.axes, known) and point not in [one for one, _ in known]
        assert 1e-4 <= point["optimizer.lr"] <= 1e-1 and point["operator.pdet.depth"] in range(2, 10)
        known.append((point, error(point)))
    early, late = ([found for _, found in part if found is not None] for part in (known[:5], known[-10:]))
    assert min(late) < min(early) and sum(late) / len(late) < sum(early) / len(early)
    two = {"num_heads": [2, 4]}
    assert sweep.suggest(two, [({"num_heads": 2}, 0.1), ({"num_heads": 4}, 0.2)]) is None, "all are known"
