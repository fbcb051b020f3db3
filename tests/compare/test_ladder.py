"""The ladder: what is measured against what, and a recommendation that rests on measurements alone."""

import pytest
import yaml

from upsnb import overlays
from upsnb.compare import ladder, ladder_figures
from upsnb.errors import ConfigError
from upsnb.hardware import Hardware
from upsnb.phases import BY_NAME, is_on, setting

LAPTOP = Hardware("cpu", 1, "a laptop", 16.0, 2)


def plan(chosen=(), **overlay):
    return ladder.plan(overlays.resolve({"training.device": "cpu", **overlay}), LAPTOP, chosen)


def row(kind: str, phase: str, median: float | None, **changes) -> dict:
    ends = [None, None] if median is None else [0.97 * median, 1.03 * median]
    ratio = {"median": median, "ci95": ends, "num_rounds": 6}
    given = {"kind": kind, "phase": phase, "ratio": ratio, "memory_gib": 1.0, "reference_memory_gib": 1.0}
    given |= {"nrmse_ratio": 1.0, "changes": {f"setting.{phase}": True}, "promised": 1.2, "against": "baseline"}
    return {**given, **changes}


def test_a_phase_alone_keeps_batch_accumulation_and_learning_rate():
    entries, off, _ = plan(**{"training.batch_size": 6, "training.accum_steps": 3})
    for entry in entries:
        changed = overlays.difference(off, entry.config)
        if entry.kind == "alone":
            assert changed.keys() <= BY_NAME[entry.phase].on.keys() and changed
            assert entry.against == ladder.BASELINE


def test_the_recipe_s_batch_is_a_rung_of_its_own_and_no_phase_is_credited_with_it():
    entries, off, _ = plan(**{"training.batch_size": 6, "training.accum_steps": 3})
    recipe = {"training.batch_size": 24, "training.accum_steps": 2}
    batch, *rungs = [entry for entry in entries if entry.kind == "ladder"]
    assert batch.phase == ladder.BATCH and overlays.difference(off, batch.config) == recipe
    before = batch.config
    for rung in rungs:
        assert overlays.difference(before, rung.config).keys() <= BY_NAME[rung.phase].on.keys()
        before = rung.config
    assert all(is_on(BY_NAME[rung.phase], before) for rung in rungs)
    (without,) = (e for e in entries if e.kind == "leave_one_out" and e.phase == ladder.BATCH)
    back = {"training.batch_size": 6, "training.accum_steps": 3}
    assert overlays.difference(before, without.config) == back and without.against == ladder.FULL
    assert ladder.BATCH not in {entry.phase for entry in plan(("compile", "bf16"))[0]}, "these bring none along"


def test_what_is_left_out_differs_from_the_full_set_in_one_phase_alone():
    entries, off, _ = plan()
    full = [entry for entry in entries if entry.kind == "ladder"][-1].config
    for entry in (entry for entry in entries if entry.kind == "leave_one_out" and entry.phase != ladder.BATCH):
        assert entry.against == ladder.FULL
        assert overlays.difference(full, entry.config).keys() <= BY_NAME[entry.phase].on.keys()
        assert not is_on(BY_NAME[entry.phase], entry.config)
        # as without any phase: without bf16 a laptop computes in float32, and not in the recipe's float16
        for path in BY_NAME[entry.phase].on:
            assert setting(entry.config, path) == setting(off, path)


def test_phases_of_the_base_are_switched_off_and_its_own_precision_stays():
    _, off, _ = plan(**{"training.compile": True, "training.inverse_loss_frequency": 4})
    assert not off.training.compile and off.training.inverse_loss_frequency == 1 and not off.training.amp


def test_phases_that_cannot_run_are_named_with_their_reason_and_not_measured():
    entries, _, skipped = plan()
    assert {"optimizer_offload"} <= skipped.keys() and all(skipped.values())
    assert not {entry.phase for entry in entries} & skipped.keys()


def test_an_unknown_phase_is_an_error_that_names_the_known_ones():
    with pytest.raises(ConfigError, match="turbo.*compile"):
        plan(chosen=("turbo",))


def test_the_fastest_set_that_keeps_its_promises_is_recommended():
    rows = [
        row("alone", "compile", 1.5),
        row("alone", "bf16", 2.0, nrmse_ratio=1.2),
        row("ladder", "loss_frequency", 3.0, memory_gib=60.0),
        row("set", ladder.GAINING, 1.9),
        row("alone", "fused", None, failed="it broke"),
    ]
    chosen = ladder.recommend(rows, {"memory_gib": 50.0, "nrmse_ratio": 1.03})
    assert chosen["phase"] == ladder.GAINING
    assert set(chosen["refused"]) == {"alone: bf16", "ladder: loss_frequency"}
    assert "accuracy" in chosen["basis"]


def test_no_set_keeps_a_phase_that_the_full_set_is_faster_without():
    rows = [
        row("alone", "compile", 1.2),
        row("alone", "activation_checkpointing", 1.3),
        row("ladder", "compile", 1.2),
        row("ladder", "activation_checkpointing", 1.5),
        row("ladder", "bf16", 2.0),
        row("leave_one_out", "compile", 1.3),
        row("leave_one_out", "activation_checkpointing", 0.85),
        row("leave_one_out", "bf16", 1.0),  # cannot be told from 1
        row("set", ladder.LESS, 1.9),
        row("set", ladder.GAINING, 1.25),
    ]
    chosen = ladder.recommend(rows, {"memory_gib": 50.0, "nrmse_ratio": 1.03})
    assert chosen["phase"] == ladder.LESS and ladder.members(rows[-2], rows) == ["compile", "bf16"]
    assert chosen["refused"].keys() == {"ladder: bf16"}
    assert "activation_checkpointing (0.85 [0.82, 0.88], slower)" in chosen["refused"]["ladder: bf16"]
    others = ladder.recommend([one for one in rows if one["phase"] != ladder.LESS], ladder.CRITERIA)
    assert others["phase"] == ladder.GAINING and ladder.members(rows[-1], rows) == ["compile"]
    refused = {"ladder: bf16", "ladder: activation_checkpointing", "alone: activation_checkpointing"}
    assert others["refused"].keys() == refused
    assert all("costs the full set" in why for why in others["refused"].values())


def test_nothing_is_recommended_that_noise_could_explain():
    rows = [row("alone", "compile", 1.02), row("alone", "bf16", 0.8)]
    chosen = ladder.recommend(rows, {"memory_gib": 50.0, "nrmse_ratio": 1.03})
    assert chosen["phase"] is None and chosen["changes"] == {} and len(chosen["refused"]) == 2


def test_accuracy_that_was_not_measured_is_not_claimed():
    chosen = ladder.recommend([row("alone", "compile", 1.5, nrmse_ratio=None)], {"memory_gib": 50, "nrmse_ratio": 1.03})
    assert "accuracy was not measured" in chosen["basis"]


def test_the_recommended_file_says_where_it_was_measured_and_loads(tmp_path):
    chosen = ladder.recommend(
        [row("alone", "compile", 1.5, changes={"training.compile": True})], {"memory_gib": 50.0, "nrmse_ratio": 1.03}
    )
    report = {"recommended": chosen, "hardware": LAPTOP.as_dict(), "num_ranks": 1, "date": "2026-01-02"}
    path = ladder.write_params(report, tmp_path / "recommended.yaml")
    assert "a laptop" in path.read_text() and "1.50 [" in path.read_text()
    assert yaml.safe_load(path.read_text())["training"] == {"compile": True}
    assert overlays.load(path).training.compile


def made_up_report(*rows: dict) -> dict:
    """A ladder's report, as far as its summary reads it."""
    keys = {"alone": "alone", "ladder": "ladder", "leave_one_out": "leave_one_out", "set": "sets"}
    listed = {key: [one for one in rows if one["kind"] == kind] for kind, key in keys.items()}
    chosen = ladder.recommend(list(rows), {"memory_gib": 50.0, "nrmse_ratio": 1.03})
    return {"kind": ladder.KIND, **listed, "skipped": {"fused": "needs CUDA"}, "recommended": chosen}


def test_the_summary_has_promise_beside_measurement_and_the_reason_where_there_is_none():
    report = made_up_report(
        row("alone", "compile", 1.5, promised=1.36),
        row("ladder", "bf16", None, failed="RunError: it broke\nand a log"),
        row("leave_one_out", "compile", 1.1),
        row("set", ladder.GAINING, 1.6, promised=None),
    )
    said = ladder.summary(report).splitlines()
    assert said[0].startswith("Recommended: compile, 1.60 [1.55, 1.65] times the baseline; rests on throughput")
    assert said[1:] == [
        "alone: compile: promised 1.36, 1.50 [1.46, 1.54]",
        "added in order: bf16: promised 1.2, failed: RunError: it broke",
        "what it adds to the full set: compile: 1.10 [1.07, 1.13]",
        "set: phases that gain alone: 1.60 [1.55, 1.65]",
        "fused is left out: needs CUDA",
    ]


def test_the_summary_recommends_nothing_where_nothing_gained():
    said = ladder.summary(made_up_report(row("alone", "compile", 0.9), row("alone", "bf16", None)))
    assert "Recommended: the baseline, because nothing beat the baseline." in said
    assert "bf16: promised 1.2, no steady step in its turns" in said and "None" not in said


def test_failed_and_skipped_phases_stand_in_table_and_figure_with_the_reason():
    report = made_up_report(
        row("alone", "compile", 1.5),
        row("alone", "bf16", None, failed="RunError: it broke"),
        row("ladder", "compile", 0.8),
    ) | {"baseline": {"memory_gib": 1.0}}
    text = ladder_figures.table(report).to_string()
    assert "it broke" in text and "needs CUDA" in text
    figure = ladder_figures.promise_and_measurement(report)
    written = [text.get_text() for ax in figure.axes for text in ax.texts]
    assert "failed" in written and "not possible here" in written and "0.80" in written
