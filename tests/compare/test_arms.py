"""Arms differ in what was asked for and nothing else; two small ones, trained to their ends and compared."""

import json
import shutil

import pytest

from upsnb import overlays
from upsnb.compare import arms, figures, verdict
from upsnb.compare.verdict import NOISE
from upsnb.config import RunConfig
from upsnb.errors import ConfigError
from upsnb.runs.handle import Run

BATCH = {"training.batch_size": 4, "training.accum_steps": 2}


@pytest.mark.parametrize(
    "stray", [{"latent.dim": 64}, {"optimizer.lr": 1e-2}, {"training.seed": 7}, {"training.lambda_spectral": 0.1}]
)
def test_arms_that_differ_in_more_than_asked_are_refused_by_name(stray):
    optimized = overlays.resolve({"training.compile": True, **stray})
    with pytest.raises(ConfigError, match=next(iter(stray))):
        arms.check_arms(RunConfig(), optimized)


def test_arms_may_differ_in_what_phases_change():
    optimized = overlays.resolve({"training.compile": True, "training.amp": True, **BATCH})
    assert arms.check_arms(RunConfig(), optimized).keys() == {"training.compile", "training.amp", *BATCH}


def test_equal_arms_are_refused():
    with pytest.raises(ConfigError, match="nothing differs|equal"):
        arms.check_arms(RunConfig(), overlays.resolve({"logging.name": "other"}))


def test_arms_that_end_by_the_clock_are_refused(tmp_path):
    short = overlays.resolve({"training.time_limit_s": 5.0})
    with pytest.raises(ConfigError, match="equal samples"):
        arms.compare(short, overlays.apply(short, {"training.compile": True}), tmp_path)


def test_an_isolated_phase_keeps_batch_accumulation_and_learning_rate():
    base = overlays.resolve(BATCH)
    changed = overlays.difference(base, arms.isolated(base, "activation_checkpointing"))
    assert changed == {"operator.pdet.use_activation_checkpoint": True}
    with pytest.raises(ConfigError, match="is no phase"):
        arms.isolated(base, "turbo")


@pytest.mark.slow
@pytest.mark.long  # the notebook of comparisons does much of it
def test_two_arms_take_turns_to_their_ends_and_leave_a_report(tiny_config, tmp_path, turns_of_steps):
    """And the report of the same runs as two that merely ended earlier has the same errors and no interval."""
    base = tiny_config(**{"stages.operator.epochs": 2})
    other = overlays.apply(base, {"operator.pdet.use_activation_checkpoint": True})
    said: list[str] = []
    runs = arms.compare(base, other, tmp_path / "ab", block_s=2.0, log=said.append)
    assert {name: [run.status() for run in those] for name, those in runs.items()} == {
        name: ["finished"] for name in ("baseline", "optimized", NOISE)
    }
    record = json.loads((tmp_path / "ab" / arms.ARMS).read_text())
    assert {block["arm"] for block in record["blocks"]} == runs.keys()

    made = arms.compare_report(tmp_path / "ab", {"speedup": 1e-9}, price_per_hour=3600.0)
    assert made["speedup"]["num_rounds"] > 1 and made["aa_ratio"]["num_rounds"] > 1
    seen = {one["samples"] for those in made["arms"].values() for one in those}
    assert len(seen) == 1, "all arms see the same samples"
    (first,), (noise,) = made["arms"]["baseline"], made["arms"][NOISE]
    assert first["nrmse"] == noise["nrmse"], "equal arms on one rank train alike bit for bit"
    assert set(made["aa_nrmse_ratio"].values()) == {1.0} and made["aa_loss_delta"] == 0.0
    assert first["cost_dollars"] == pytest.approx(first["train_time_s"])
    assert made["verdict"] == "passed", made["criteria"]
    (tight,) = (c for c in arms.compare_report(tmp_path / "ab", {"speedup": 1e9})["criteria"] if c["name"] == "speedup")
    assert not tight["passed"]

    later = verdict.compare(Run.attach(runs["baseline"][0].folder), runs["optimized"][0])
    assert later["nrmse_ratio"] == made["nrmse_ratio"]
    assert later["speedup"]["ci95"] == [None, None] and not later["interleaved"]

    shutil.rmtree(tmp_path / "ab" / "runs")  # what is kept of a comparison is its report
    (tmp_path / "ab" / arms.ARMS).unlink()
    assert list(figures.write_figures(tmp_path / "ab")) == ["speed", "quality", "outcome"]
