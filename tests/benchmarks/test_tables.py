"""Tables of the documents: made from reports as the notebooks write them, with losses, failures and gaps in them."""

from types import SimpleNamespace

import pandas as pd
import pytest
import readme
import tables

from upsnb import hardware, overlays
from upsnb.compare import ladder, scaling, verdict
from upsnb.compare import turns as shared
from upsnb.compare.turns import Block, Turns
from upsnb.config import OPERATOR
from upsnb.errors import RunError
from upsnb.hardware import Hardware
from upsnb.phases import EXTRAS, PHASES
from upsnb.profile import flops, recorder
from upsnb.profile import report as profiling
from upsnb.runs import handle, runfolder, throughput

LAPTOP = Hardware("cpu", 1, "a laptop", 16.0, 2)
RATES = {"compile": 1.5, "bf16": 0.8}  # of an entry over its reference's; 1 for all others


class Waiting:
    """A paused run that was never started."""

    def __init__(self, config, folder):
        self.run, self.events = SimpleNamespace(folder=folder, resume=lambda: None, stop=lambda: None), []
        self.peak_memory_gib = 1.0
        if folder.name == "alone-data_loading":
            raise RunError("workers: would not start -> look at the log\nand more")

    def is_alive(self):
        return True

    def end(self):
        pass


def turns(arms, seed, block_s, say, rounds):
    """Blocks of the two, one second each, whose rates are those of RATES with a little noise."""
    kind, _, name = arms["it"].run.folder.name.partition("-")
    rate = RATES.get(name, 1.0) ** (-1 if kind == "leave_one_out" else 1)
    rates = {"it": rate, "reference": 1.0}
    return [Block(arm, 0, k, rates[arm] * (1 + 0.01 * (k % 2)), 1) for k in range(4) for arm in arms]


@pytest.fixture
def phases_report(monkeypatch, tmp_path):
    """What 04_phases writes on a laptop where compile gains, bf16 loses and the loader does not start."""
    monkeypatch.setattr(Turns, "start", Waiting)
    monkeypatch.setattr(shared, "interleave", turns)
    monkeypatch.setattr(hardware, "detect", lambda: LAPTOP)
    base = overlays.resolve({"training.device": "cpu"})
    chosen = [phase.name for phase in PHASES if phase.name != "fsdp2"]
    found = {"changes": {"training.compile": True}, "ratio": {"median": 1.5, "ci95": [1.5, 1.5]}, "basis": "turns"}
    monkeypatch.setattr(ladder, "recommend", lambda *arguments: {**found, "refused": {}, "tried": []})
    return ladder.measure(base, tmp_path, chosen=chosen, minutes=1, log=lambda text: None)


@pytest.fixture
def profile(tiny_config, train_here, monkeypatch, tmp_path):
    """A run of a few steps with a profile."""
    monkeypatch.setattr(recorder, "TIMED_STEPS", 4)
    monkeypatch.setattr(recorder, "TRACED_STEPS", 2)
    monkeypatch.setattr(flops, "SIZES", {"cpu": (128,)})
    monkeypatch.setattr(flops, "COPIED", 1000)
    folder, asked = tmp_path / "profile", []

    def ask(step):
        if step == 3 and not asked:
            asked.append(handle.Run(folder).profile())
        if step == 16:
            handle.Run(folder).stop()

    train_here(tiny_config(names=("advection",), **{"evaluation.rollout": False}), folder, ask)
    runfolder.update_manifest(folder, segments=[{"started": runfolder.read_manifest(folder)["created"]}])
    return handle.Run(folder)


@pytest.fixture
def scaling_report(profile, monkeypatch, tmp_path):
    """What 05_scaling writes on a laptop, which can only rehearse: one row measured, one left out."""
    monkeypatch.setattr(Turns, "start", Waiting)
    monkeypatch.setattr(shared, "interleave", turns)
    monkeypatch.setattr(profiling, "take", lambda run: {"stage": OPERATOR})
    records = profiling.read(profile.folder, 1)
    monkeypatch.setattr(profiling, "read", lambda folder, num_ranks: num_ranks * records)
    monkeypatch.setattr(hardware, "detect", lambda: LAPTOP)
    base = overlays.resolve({"training.device": "cpu", "training.batch_size": 5, "training.accum_steps": 2})
    return scaling.measure(base, tmp_path / "scaling", ranks=[1, 2, 4], wrappers=["ddp"], log=lambda text: None)


def rows(text: str) -> dict[str, list[str]]:
    """Cells of a Markdown table's rows, by their first cell that is no number."""
    split = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line[:1] == "|"]
    widths = {len(cells) for cells in split}
    assert len(widths) == 1, f"rows of {widths} cells"
    return {next((cell for cell in cells if not cell.isdigit()), ""): cells for cells in split}


def test_families_where_another_model_is_better_are_counted_as_such():
    def model(mean, prefix, **references):
        errors = {f"{prefix}nrmse_{key}": mean for key in ("mean", "median", "p90")}
        return {**errors, "references": references, "num_trained": 9, "num_samples": 3}

    def seed(ours, theirs, prefix="", **references):
        return {"time_s": 300.0, "ups": model(ours, prefix, **references), "neuralop": model(theirs, prefix)}

    families = {
        "darcy2d": [seed(0.02, 0.04, look_up=0.25), seed(0.02, 0.06, look_up=0.25)],
        "burgers1d": [seed(0.3, 0.2, "rollout_", persistence=0.9)],
        "cfd1d": [seed(0.1, 0.3), seed(0.3, 0.2)],
    }
    origin = {"hardware": LAPTOP.as_dict(), "versions": {"torch": "2"}, "date": "2026-01-01"}
    text, made = tables.eleven({"families": families, "generated": {"cfd3d": [seed(0.1, 0.2)]}, **origin}).split(
        "\n\nGenerated data: "
    )
    assert "smaller mean error in 1 of 1 families, with each of several seeds in 0" in made and "2.00" in made
    assert text.startswith("Small files cut from PDEBench's: 300 s for each training, 2 cores"), text
    assert "smaller mean error in 2 of 3 families, with each of several seeds in 1" in text
    found = rows(text)
    assert "2.50 (2.00 to 3.00)" in found["darcy2d"] and "9 / 3" in found["darcy2d"] and "2" in found["darcy2d"]
    assert "0.67" in found["burgers1d"] and "0.9" in found["burgers1d"] and "0.25" in found["darcy2d"]
    assert "1.25 (0.67 to 3.00)" in found["cfd1d"]


def test_rows_of_one_machine_say_their_day_and_rows_of_several_their_machine():
    first = {"hardware": LAPTOP.as_dict(), "versions": {"torch": "2"}, "date": "2026-01-01"}
    head, told = tables.places({}, [first, {**first, "date": "2026-01-02"}])
    assert head.endswith("torch 2, on the day that each row says") and told == ["2026-01-01", "2026-01-02"]
    head, told = tables.places({}, [first, {**first, "versions": {"torch": "3"}}])
    assert head == "measured where each row says" and [*map(len, told)] == [len(tables.where(first))] * 2


def test_phases_that_lose_fail_or_cannot_run_say_so_beside_their_promise(phases_report):
    found = {name: " | ".join(cells) for name, cells in rows(readme.phases(phases_report)).items()}
    assert "1.36 | 1.50 [1.50, 1.50] | 1 | 1.36 | 1.50 [1.50, 1.50] | 1 | 1.50 [" in found["compile"]
    assert "1.10 | 0.80 [0.80, 0.80], slower | 1 | 3.75 | 0.80 [0.80, 0.80], slower" in found["bf16"]
    assert "1.07 | failed: workers: would not start" in found["data_loading"]
    assert " | - | 2.78 | 1.00 [" in found["data_loading"]
    assert "AdamW already steps in host memory, because this run is on the CPU" in found["optimizer_offload"]
    assert "1.23 | cannot run here: " in found["optimizer_offload"]
    assert "1.13 | 1.00 [" in found["fused"]
    assert "fsdp2" not in found, "it was not asked for"
    assert all(f"| {phase.name} | " in readme.facts() for phase in (*PHASES, *EXTRAS))


def test_phases_name_machine_versions_date_and_the_set_to_use(phases_report):
    text = readme.phases(phases_report)
    versions = hardware.versions()["torch"]
    assert f"UPS, 2 cores of an a laptop, torch {versions}, {phases_report['date']};" in text
    assert "Recommended: compile, 1.50 [1.50, 1.50] times the baseline; rests on turns." in text
    gpu = {**phases_report, "hardware": {**LAPTOP.as_dict(), "device": "cuda", "device_name": "H"}, "settings": {}}
    assert readme.phases(gpu).startswith("UPS, 1 x H, torch")


def test_a_rehearsal_says_so_and_promises_stand_beside_what_was_measured(scaling_report):
    text = readme.scalings(scaling_report)
    assert scaling_report["rehearsal"] and scaling.REHEARSAL in text
    two = next(row for row in scaling_report["rows"] if row["ranks"] == 2)
    (line,) = [line for line in text.splitlines() if line.startswith("| 2 | ddp | weak |")]
    assert "| 1.7 to 1.9 | 1.00 [1.00, 1.00] |" in line
    assert line.endswith(f"| {two['communication_share']:.1%} | {two['bytes_per_step'] / 1e6:.3g} |")
    assert "| 4 | ddp | strong | - " in text and "5 x accum_steps 2 pairs cannot be shared by 4 ranks" in text


def test_a_comparison_shows_each_criterion_and_whether_it_holds(tiny_config, train_here, monkeypatch, tmp_path):
    monkeypatch.setattr(throughput, "WINDOW_S", 0.01)
    arms = []
    for name, overlay in (("slow", {}), ("quick", {"training.compile_mode": "max-autotune"})):
        train_here(tiny_config(names=("advection",), **{"evaluation.rollout": False, **overlay}), tmp_path / name)
        runfolder.update_manifest(tmp_path / name, status="finished")
        arms.append(handle.Run(tmp_path / name))
    made = verdict.compare(*arms, criteria={"speedup": 1e9, "nrmse_ratio": 1.03})
    found, ratio = rows(readme.compare(made)), made["speedup"]["median"]
    assert found["speedup"][1:] == [">= 1e+09", f"{ratio:.4g}", "no"]  # without equal arms no column for them
    assert found["throughput over the baseline's"][2] == f"{ratio:.2f} (no interval)"
    assert found["nrmse_ratio"][1:] == ["<= 1.03", "1", "yes"]
    assert found["nRMSE over the baseline's, advection"][2] == "1" and found["verdict"][2] == "failed"


def test_a_profile_shows_every_share_and_what_stands_out(profile):
    made = profiling.report(profile)
    text = readme.profile(made)
    found = rows(text)
    assert [found[name][1] for name in profiling.SHARES] == [f"{made['shares'][name]:.1%}" for name in profiling.SHARES]
    assert all(f"- {row['sentence']}" in text for row in made["findings"]) and made["findings"]
    assert f"at {made['mfu']:.1%} of its matrix peak" in text


def test_memory_shows_the_committed_prediction_beside_its_measurement():
    (made,) = readme.reports("memory")
    text = readme.memory(made)
    found = rows(text.partition("The largest")[0])
    for row in made["rows"]:
        assert found[row["config"]][1] == f"{row['predicted_gib']:.4g}"
        assert (row["measured_gib"] is None) == (found[row["config"]][2] == "-")
        assert (row["not_measured"] or "-") in found[row["config"]]
    batches = rows(text.partition("The largest")[2])
    for row in made["fits"]:
        shown = [int(cell.replace(",", "")) for cell in batches[row["phases"]][1:]]
        assert any(size <= row["batch_size"] < size + 10 ** (len(str(size)) - 2) for size in shown)


def test_what_nobody_measured_is_not_measured():
    assert readme.of_each(readme.phases, "no such study") == "Not measured yet."


def test_a_bar_inside_a_cell_does_not_end_it_and_an_empty_column_is_left_out():
    table = readme.markdown(pd.DataFrame({"a": ["x|y"], "b": ["z"], "c": ["-"]}))
    assert table.splitlines() == ["| a | b |", "| --- | --- |", "| x/y | z |"]


def test_a_section_is_rewritten_wherever_its_marks_stand_and_an_unknown_one_is_refused(monkeypatch):
    monkeypatch.setitem(readme.SECTIONS, "quick", lambda: "new \\1 lines")
    text = "before\n<!-- quick -->\nold\n<!-- /quick -->\nafter <!-- quick --> stays"
    assert (
        readme.rewritten(text) == "before\n<!-- quick -->\nnew \\1 lines\n<!-- /quick -->\nafter <!-- quick --> stays"
    )
    for wrong in ("<!-- slow -->\nold\n<!-- /slow -->", "<!-- quick -->\nwithout an end"):
        with pytest.raises(ValueError, match="no such section, or no end of it"):
            readme.rewritten(wrong)
    assert readme.SECTIONS["conflicts"]()


def test_each_example_is_told_in_its_own_unit_and_error():
    trained = {"unit": "tokens", "metric": "perplexity", "train_time_s": 300.0, "samples_per_s": {"median": 9000.0}}
    trained["reached"] = {"text": {"error": 12.0, "baseline": "unigram", "baseline_error": 72.0}}
    compared = {"speedup": {"median": 2.5, "ci95": [2.4, 2.6]}, "error_ratio": {"text": 1.01}}
    machine = {"device": "cpu", "num_cores": 2, "device_name": "a laptop", "num_devices": 1}
    measured = {"hardware": machine, "versions": {"torch": "2.13.0"}, "date": "2026-11-24"}
    memory = {"predicted": 123.456, "measured": 124.321}
    found = {"trained": trained, "compared": compared, "collecting_ms": 61.0, "memory_mib": memory, **measured}
    report = {"examples": {"long_context": found}}
    row = tables.workloads(report).splitlines()[-1]
    for text in (
        "perplexity",
        "12",
        "unigram 72",
        "| 2 |",
        "2.50 [2.40, 2.60]",
        "1.01",
        "| 123.5 | 124.3 | 61 |",
        "9,000 tokens/s",
        "laptop",
    ):
        assert text in row, (text, row)
    compared["error_ratio_range"] = {"text": [0.97, 1.04]}
    assert "1.01 (0.97 to 1.04)" in tables.workloads(report).splitlines()[-1]
    trained["cores"] = 1
    report["examples"]["long_context"].pop("compared")
    row = tables.workloads(report).splitlines()[-1]
    assert "| 1 |" in row and "not measured" in row and "2.50" not in row


def test_a_search_is_told_beside_the_file_written_by_hand():
    def ratio(median):
        return {"median": median, "ci95": [median - 0.1, median + 0.1]}

    row = {"change": "compile", "ratio": ratio(1.3), "kept": True}
    sets = {"all that gains": {"epochs": 1, "nrmse_ratio": 0.98, "tolerance": 1.1, "holds": True}}
    chosen = {"changes": {"training.compile": True}, "ratio": ratio(1.4), "basis": "turns", "tried": [row]}
    compared = {"speedup": ratio(1.9), "aa_ratio": ratio(1.0)}
    compared |= {"nrmse_ratio": {"darcy": 1.02}, "aa_nrmse_ratio": {"darcy": 0.97}}
    machine = {"device": "cpu", "num_cores": 2, "device_name": "a laptop", "num_devices": 1}
    report = {"params": ["slow", "by_hand"], "minutes": 26.2, "compared": compared, "hardware": machine}
    report |= {"recommended": {**chosen, "accuracy": sets}, "versions": {"torch": "2.13.0"}, "date": "2026-11-25"}
    text = tables.search(report)
    for said in (
        "26 minutes from `slow`",
        "| compile | 1.30",
        "all that gains, 1 epoch |",
        "`by_hand` is 1.90 [1.80, 2.00]",
        "darcy 1.02 times",
        "darcy 0.97",
    ):
        assert said in text, (said, text)
