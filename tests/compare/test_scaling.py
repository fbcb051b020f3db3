"""Scaling: which configs are compared, what is only a rehearsal, and one small measurement with real ranks."""

import json
from types import SimpleNamespace

import pytest
from made_runs import START

from upsnb import hardware, overlays
from upsnb.compare import scaling, scaling_figures
from upsnb.config import RunConfig
from upsnb.errors import ConfigError
from upsnb.hardware import Hardware

CPU = Hardware("cpu", 1, "a processor", 16.0, 8)
ONE_GPU = Hardware("cuda", 1, "a GPU", 80.0, 8, (9, 0))
TWO_GPUS = Hardware("cuda", 2, "a GPU", 80.0, 8, (9, 0))
BASE = overlays.resolve({"training.batch_size": 8, "training.accum_steps": 2})


def by_name(found, **options):
    entries, *rest = scaling.plan(options.pop("base", BASE), found, **options)
    return {entry.name: entry.config for entry in entries}, *rest


def test_strong_scaling_keeps_the_effective_batch_and_weak_the_batch_of_a_rank():
    entries, reference, skipped, _ = by_name(CPU)
    assert not skipped
    for name, config in entries.items():
        training, one = config.training, reference.training
        effective = training.batch_size * training.accum_steps * training.num_gpus
        if name.endswith("strong"):
            assert effective == one.batch_size * one.accum_steps
        else:
            assert (training.batch_size, training.accum_steps) == (one.batch_size, one.accum_steps)


def test_entries_differ_from_one_rank_in_nothing_but_ranks_wrapper_and_share():
    entries, reference, *_ = by_name(CPU)
    allowed = {"training.num_gpus", "training.use_fsdp2", "training.batch_size", "training.accum_steps"}
    for config in entries.values():
        assert overlays.difference(reference, config).keys() <= allowed
    assert entries["1-ddp-again"] == reference and entries["1-fsdp2-weak"].training.use_fsdp2


def test_a_batch_that_cannot_be_shared_is_left_out_with_its_reason():
    odd = overlays.apply(BASE, {"training.batch_size": 5, "training.accum_steps": 2})
    entries, _, skipped, _ = by_name(CPU, base=odd, wrappers=["ddp"])
    assert entries.keys() == {"1-ddp-again", "2-ddp-weak", "4-ddp-weak", "2-ddp-strong"}
    assert skipped.keys() == {"4-ddp-strong"} and "choose multiples" in skipped["4-ddp-strong"]


@pytest.mark.parametrize(("found", "rehearsal"), [(CPU, True), (ONE_GPU, True), (TWO_GPUS, False)])
def test_more_ranks_than_devices_is_called_a_rehearsal(found, rehearsal, monkeypatch):
    monkeypatch.setattr(hardware, "detect", lambda: found)
    entries, reference, skipped, said = by_name(found, wrappers=["ddp"], modes=["weak"])
    assert said is rehearsal
    assert (reference.training.device == "cpu") is rehearsal
    assert ("4-ddp-weak" in skipped) is not rehearsal  # ranks without a device are left out of a measurement
    assert "2-ddp-weak" in entries


def test_unknown_names_are_refused_together():
    with pytest.raises(ConfigError) as refused:
        scaling.plan(RunConfig(), CPU, ranks=[0], wrappers=["dp"], modes=["strange"])
    assert len(refused.value.problems) == 3


@pytest.mark.slow
@pytest.mark.long  # the notebook of scaling does the same
def test_two_ranks_are_measured_beside_one(tiny_config, tmp_path, turns_of_steps):
    config = tiny_config(names=("advection",))
    made = scaling.measure(
        config, tmp_path, ranks=[2], wrappers=["ddp"], modes=["weak"], block_s=2.0, rounds=1, log=lambda text: None
    )
    (row,) = made["rows"]
    assert "failed" not in row and made["rehearsal"]
    assert 0 < row["communication_share"] < 1 and row["collectives"]["all_reduce"]["calls"] >= 1
    assert row["efficiency"] == row["ratio"]["median"] / 2 and row["promised"] == [1.7, 1.9]
    assert json.loads((tmp_path / "report.json").read_text()) == made
    assert "rehearse" in scaling.summary(made)
    assert scaling_figures.write_figures(tmp_path)["scaling"].stat().st_size > 10_000
    assert list(scaling_figures.table(made)["promised"]) == ["1.7 to 1.9"]


def test_scaling_of_another_workload_counts_in_its_unit(of_tokens, tmp_path, monkeypatch):
    one = SimpleNamespace(events=[{"kind": "start", **START}], end=lambda: None)
    ratio = {"median": 1.8, "ci95": [1.7, 1.9], "num_rounds": 6}
    monkeypatch.setattr(hardware, "detect", lambda: CPU)
    monkeypatch.setattr(scaling.Turns, "start", lambda *_: one)
    monkeypatch.setattr(scaling, "measure_beside", lambda *_, **__: {"ratio": ratio})
    written = []

    def log(text):
        written.append(len(json.loads((tmp_path / "report.json").read_text())["rows"]))

    report = scaling.measure(BASE, tmp_path, ranks=[2], wrappers=["ddp"], log=log)
    assert written == [1, 2], "each row is written at once"
    assert "tokens/s" in scaling_figures.table(report) and "samples/s" not in scaling_figures.table(report)
    del report["unit"]  # as in a report of before
    assert "samples/s" in scaling_figures.table(report)
