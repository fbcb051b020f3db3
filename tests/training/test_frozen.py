"""A cache of what a frozen model says: valid by hash, whole whenever it is there, and none where it would not pay."""

import numpy as np
import pytest
import torch

from upsnb.training import frozen
from upsnb.training.frozen import Costs


@pytest.fixture
def model():
    torch.manual_seed(0)
    return torch.nn.Linear(3, 4)


def compute(model, inputs, calls=None):
    def of(numbers):
        if calls is not None:
            calls.append(len(numbers))
        with torch.no_grad():
            return model(inputs[numbers])

    return of


def test_rows_are_those_that_the_model_says_in_any_order(model, tmp_path):
    inputs = torch.randn(23, 3)
    rows = frozen.build(tmp_path / "a-1.npy", compute(model, inputs), 23, 5, print)
    numbers = np.array([22, 0, 7, 7])
    torch.testing.assert_close(rows.read(numbers), model(inputs[numbers]).detach(), rtol=1e-6, atol=1e-6)
    assert rows.values.shape == (23, 4) and not isinstance(rows.values, torch.Tensor)


def test_it_is_computed_once_and_what_another_model_said_goes(model, tmp_path):
    inputs, calls = torch.randn(12, 3), []
    first = frozen.place(tmp_path, "a", frozen.key(model.state_dict(), "data"))
    for _ in range(2):
        frozen.build(first, compute(model, inputs, calls), 12, 5, print)
    assert calls == [5, 5, 2]
    with torch.no_grad():
        model.weight[0, 0] += 1e-6
    second = frozen.place(tmp_path, "a", frozen.key(model.state_dict(), "data"))
    other = frozen.build(frozen.place(tmp_path, "b", "1"), compute(model, inputs), 12, 5, print)
    frozen.build(second, compute(model, inputs), 12, 5, print)
    assert second != first and first.exists()
    frozen.discard_others(second)
    assert sorted(tmp_path.iterdir()) == sorted([second, other.path])


def test_of_two_names_of_which_one_begins_as_the_other_does_both_stay(model, tmp_path):
    inputs = torch.randn(12, 3)
    paths = [frozen.place(tmp_path, name, "1") for name in ("ks-fine", "ks")]
    for path in paths:
        frozen.build(path, compute(model, inputs), 12, 5, print)
    frozen.discard_others(paths[1])
    assert all(path.exists() for path in paths)


def test_the_key_is_of_weights_their_names_and_all_else(model):
    weights = model.state_dict()
    same = frozen.key(weights, "data", 3)
    assert same == frozen.key(dict(weights), "data", 3)
    renamed = {f"x.{name}": value for name, value in weights.items()}
    others = frozen.key(renamed, "data", 3), frozen.key(weights, "data", 4), frozen.key(weights, "dat", 3)
    assert len({same, *others}) == 4
    assert frozen.key({"a": torch.ones(2, dtype=torch.bfloat16)}) != frozen.key({"a": torch.ones(2)})


def test_one_that_was_cut_off_is_never_taken_for_whole(model, tmp_path):
    inputs, path = torch.randn(12, 3), tmp_path / "a-1.npy"

    def fails(numbers):
        if numbers[0]:
            raise RuntimeError("power cut")
        return compute(model, inputs)(numbers)

    with pytest.raises(RuntimeError, match="power cut"):
        frozen.build(path, fails, 12, 5, print)
    assert not path.exists()
    rows = frozen.build(path, compute(model, inputs), 12, 5, print)
    torch.testing.assert_close(rows.read(np.arange(12)), model(inputs).detach())
    assert [each.name for each in tmp_path.iterdir()] == ["a-1.npy"]


@pytest.mark.parametrize(
    ("costs", "seen", "free", "said"),
    [
        (Costs(2e-3, 1e-5, 10**6), 30, 10**9, ""),
        (Costs(1e-5, 2e-3, 10**6), 30, 10**9, "reading a row takes 2 ms and computing it 0.01 ms"),
        (Costs(2e-3, 1e-5, 10**6), 1, 10**9, "each row is asked for 1 times"),
        (Costs(2e-3, 1e-5, 10**9), 30, 10**9, "it takes 0.93 GiB, and the disk has 0.93 GiB left"),
    ],
)
def test_why_one_would_not_pay_is_said(costs, seen, free, said):
    found = costs.against(seen, free)
    assert said in found and bool(said) == bool(found)


def test_a_trial_measures_both_and_leaves_nothing(model, tmp_path):
    calls = []
    costs = frozen.tried(compute(model, torch.randn(40, 3), calls), 40, 8, tmp_path / "new", "cpu")
    assert costs.nbytes == 40 * 4 * 4 and costs.compute_s > 0 and costs.read_s > 0
    assert set(calls) == {8} and not list((tmp_path / "new").iterdir())
    assert frozen.free_bytes(tmp_path / "not" / "yet") > 0
