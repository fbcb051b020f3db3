"""A later stage answers for a run only where it has beaten the one before it beyond chance."""

import math

import numpy as np
import pytest
import torch

from upsnb.errors import RunError
from upsnb.report.file import verdict
from upsnb.runs import runfolder
from upsnb.training import gates


def errors(count=40, seed=0):
    return np.random.default_rng(seed).lognormal(0.0, 1.0, count)


def shifted(factor, noise=0.1, count=40):
    base = errors(count)
    return {"a": base * factor * np.random.default_rng(1).lognormal(0.0, noise, count)}, {"a": base}


@pytest.mark.parametrize(("factor", "verdict"), [(0.8, "pass"), (1.0, "no gain"), (1.25, "harm"), (1.01, "no gain")])
def test_a_difference_beyond_chance_decides(factor, verdict):
    found = gates.judge(*shifted(factor))
    assert found["verdict"] == verdict
    assert found["ci95"][0] < found["ratio"] < found["ci95"][1]
    assert found["ratio"] == pytest.approx(factor, rel=0.1)


def test_what_any_ensemble_gains_is_told_beside_the_verdict():
    base = dict(enumerate(errors(40)))
    found = gates.beside(measured(base), measured({sample: 2 * score for sample, score in list(base.items())[:10]}))
    assert found["perturbed_ratio"] == pytest.approx(0.5) and found["perturbed_ci95"] == pytest.approx([0.5, 0.5])
    assert gates.beside(measured(base), {}) == {"perturbed_ratio": None, "perturbed_ci95": [None, None]}
    gate = {"verdict": "pass", "ratio": 0.6, "ci95": [0.5, 0.7], "against": "finetune", "mean_ratio": 0.6}
    assert verdict(gate | found).endswith(
        "of the error of finetune; 0.5 (0.5 to 0.5) of what perturbed frames score without it"
    )
    assert verdict(gate) == "pass: 0.6 (0.5 to 0.7) of the error of finetune", "a run of before"


def test_the_best_of_several_is_chosen_for_each_dataset():
    tried = [{"a": {"crps": a}, "b": {"crps": b}} for a, b in [(math.nan, 0.3), (0.2, 0.4), (0.1, math.inf)]]
    assert gates.best(tried) == {"a": {"crps": 0.1}, "b": {"crps": 0.3}}


def test_samples_are_compared_with_themselves():
    """Errors that scatter tenfold from sample to sample hide nothing when both models are asked about the same ones."""
    ours, theirs = shifted(0.9, noise=0.02)
    assert gates.judge(ours, theirs)["verdict"] == "pass"
    shuffled = {"a": np.random.default_rng(2).permutation(ours["a"])}
    assert gates.judge(shuffled, theirs)["verdict"] == "no gain"


def test_equal_models_gain_nothing_about_as_often_as_promised():
    verdicts = []
    for seed in range(200):
        draws = np.random.default_rng(seed)
        base = draws.lognormal(0.0, 1.0, 30)
        both = ({"a": base * draws.lognormal(0.0, 0.2, 30)} for _ in range(2))
        verdicts.append(gates.judge(*both)["verdict"])
    assert verdicts.count("no gain") >= 170


def test_datasets_count_alike_whatever_the_size_of_their_errors():
    base = errors()
    found = gates.judge({"a": 0.5 * base, "b": 2e6 * base}, {"a": base, "b": 1e6 * base})
    assert found["ratio"] == pytest.approx(1.25)


@pytest.mark.parametrize("bad", [{"a": [1.0] * 7}, {"a": [1.0] * 39 + [float("nan")]}, {"a": [float("inf")] * 40}, {}])
def test_what_cannot_be_measured_is_not_judged(bad):
    other = {name: [1.0] * len(values) for name, values in bad.items()}
    for pair in ((bad, other), (other, bad)):
        found = gates.judge(*pair)
        if len(bad.get("a", ())) != 7:
            assert found["verdict"] == "not measurable" and found["ratio"] is None
    assert gates.judge(bad, bad)["verdict"] == "not measurable"


def measured(scores: dict[int, float], mean: float = 1.0) -> dict:
    """CRPS by sample; nRMSE of the mean is so much of it."""
    found = {"crps": list(scores.values()), "mean_nrmse": [mean * score for score in scores.values()]}
    return {"a": {"samples": list(scores), "per_sample": found}}


@pytest.mark.parametrize(("mean", "verdict"), [(1.0, "pass"), (1.6, "pass"), (3.0, "no gain")])
def test_a_spread_that_was_paid_for_with_the_mean_is_no_gain(mean, verdict):
    base = dict(enumerate(errors(40)))
    better = measured({sample: 0.6 * score for sample, score in base.items()}, mean)
    found = gates.compared(better, measured(base))
    assert found["verdict"] == verdict and found["mean_ratio"] == pytest.approx(0.6 * mean)
    assert found["ratio"] == pytest.approx(0.6), "what CRPS says is told all the same"


@pytest.mark.parametrize(
    ("factor", "verdict", "ends"), [(1.0, "no gain", False), (1.1, "harm", False), (2.0, "harm", True)]
)
def test_a_first_look_is_ended_by_what_chance_hardly_ever_does(factor, verdict, ends):
    """Few samples show that a stage is worse far sooner than that it is so beyond doubt."""
    draws = np.random.default_rng(3)
    base = draws.lognormal(0.0, 1.0, 12)
    other = factor * base * draws.lognormal(0.0, 0.2, 12)
    sides = [measured(dict(enumerate(values))) for values in (other, base)]
    assert gates.compared(*sides)["verdict"] == verdict
    assert gates.harms(*sides) == ends


def test_a_first_look_at_too_few_or_broken_errors_ends_nothing():
    base = dict(enumerate(errors(20)))
    assert not gates.harms(measured({0: 9.0}), measured(base))
    assert not gates.harms(measured(base | {3: math.nan}), measured(base))


def test_samples_are_compared_with_themselves_whatever_order_ranks_have_measured_them_in():
    base = dict(enumerate(errors(20)))
    control = measured({sample: 2 * score for sample, score in reversed(base.items())})
    found = gates.compared(measured(base), control)
    assert (found["verdict"], found["samples"]) == ("pass", 20) and found["ratio"] == pytest.approx(0.5)
    assert found["ci95"] == pytest.approx([0.5, 0.5]), "each sample is half of itself"


def test_samples_that_only_one_has_do_not_judge():
    base = dict(enumerate(errors(20)))
    more = base | dict.fromkeys(range(100, 150), 1e9)
    assert gates.compared(measured(more), measured(base)) == gates.compared(measured(base), measured(base))
    apart = measured({sample + 1000: score for sample, score in base.items()})
    assert gates.compared(measured(base), apart)["verdict"] == "not measurable"
    assert gates.compared(measured(base), {})["verdict"] == "not measurable"


def test_a_dataset_that_only_one_stage_was_measured_on_is_not_judged():
    base = np.linspace(1, 2, 20)
    assert gates.judge({"a": base, "b": base}, {"a": 2 * base})["verdict"] == "not measurable"
    assert gates.judge({"a": base}, {})["verdict"] == "not measurable"


def test_the_same_errors_give_the_same_verdict():
    assert gates.judge(*shifted(0.95)) == gates.judge(*shifted(0.95))


@pytest.mark.parametrize("answers", ["operator", "crps"])
def test_what_each_stage_is_measured_against(tiny_config, tmp_path, answers):
    later = ("finetune", "crps", "diff_residual", "consistency_distill")
    config = tiny_config(**{f"stages.{stage}.epochs": 1 for stage in later})
    runfolder.create(config, tmp_path)
    gates.keep(tmp_path, answers, {}, {})
    gates.note(tmp_path, answers, "pass")
    found = [gates.control(config, stage, tmp_path) for stage in config.stages.planned]
    assert found == [None, "operator", "finetune", answers, "diff_residual"]
    assert gates.control(tiny_config(**{"stages.crps.epochs": 1}), "crps", tmp_path) == "operator"


def test_weights_that_are_kept_come_back_and_others_are_asked_for_in_vain(tmp_path):
    weights = {"a": torch.randn(3), "b": torch.ones(2, dtype=torch.complex64)}
    gates.keep(tmp_path, "operator", weights, {"a": {"crps": math.nan}})
    found = gates.kept(tmp_path, "operator")
    assert found.keys() == weights.keys() and all(torch.equal(found[name], weights[name]) for name in weights)
    assert runfolder.measured(tmp_path, "operator") == {"a": {"crps": None}} and not runfolder.measured(
        tmp_path, "crps"
    )
    with pytest.raises(RunError, match="choose one that has ended: operator"):
        gates.kept(tmp_path, "crps")
    with pytest.raises(RunError, match="none has"):
        gates.kept(tmp_path / "other", "crps")


@pytest.mark.parametrize("damage", [b"", b"not torch's", None])
def test_damaged_weights_are_one_sentence(tmp_path, damage):
    gates.keep(tmp_path, "operator", {"a": torch.randn(300)}, {})
    path = tmp_path / runfolder.STAGES / "operator.pt"
    path.write_bytes(path.read_bytes()[:700] if damage is None else damage)
    with pytest.raises(RunError, match="operator.pt: cannot be read .* -> train the stage again"):
        gates.kept(tmp_path, "operator")


def test_nothing_in_a_weights_file_is_executed(tmp_path):
    class Bad:
        def __reduce__(self):
            return (open, (str(tmp_path / "executed"), "w"))

    (tmp_path / runfolder.STAGES).mkdir()
    torch.save({"a": Bad()}, tmp_path / runfolder.STAGES / "operator.pt")
    with pytest.raises(RunError, match="cannot be read"):
        gates.kept(tmp_path, "operator")
    assert not (tmp_path / "executed").exists()
