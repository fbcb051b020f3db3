"""What a run costs: all of its time, and an end where the budget is spent."""

import pytest
from made_runs import CONFIG, END, START, of, step, write_run

from upsnb import overlays
from upsnb.errors import RunError
from upsnb.runs import checkpoint_index, cost, runfolder
from upsnb.runs.table import table
from upsnb.values import CostConfig

HOUR = 3600.0
PRICED = {"cost.price_per_hour": 2.0, "cost.budget": 5.0}


def priced(folder, segments, **applied):
    """A run at $2 an hour with a budget of $5."""
    events = [{"kind": "segment", "step": 0, "number": 0}, {"kind": "start", "step": 0, **START}, step(1)]
    config = overlays.apply(CONFIG, PRICED)
    run = write_run(folder, [*events, {"kind": "end", "step": 1, **END}], config=config)
    overlay = {"revision": 1, "overlay": {f"cost.{name}": value for name, value in applied.items()}}
    runfolder.update_manifest(folder, segments=segments, applied=overlay)
    return run


def test_all_launches_count_and_what_lies_between_them_does_not(tmp_path):
    launches = [{"started": 0.0, "ended": HOUR}, {"started": 10 * HOUR, "ended": 10.5 * HOUR}, {"started": 20 * HOUR}]
    run = priced(tmp_path, launches)
    assert cost.held_s(run.manifest, now=20.25 * HOUR) == 1.75 * HOUR
    assert cost.of(run.current_config.cost, cost.held_s(run.manifest, now=20.25 * HOUR)) == {
        "price_per_hour": 2.0, "held_s": 1.75 * HOUR, "dollars": 3.5, "budget": 5.0,
    }  # fmt: skip
    assert cost.held_s(run.manifest, now=19 * HOUR) == 1.5 * HOUR, "a clock that was put back takes nothing away"


def test_a_run_whose_machine_died_cost_nothing_afterwards(tmp_path):
    run = priced(tmp_path / "run", [{"started": 0.0}])
    runfolder.update_manifest(run.folder, status="running", supervisor="1:gone")
    last = run.events()[-1]["time"]
    runfolder.update_manifest(run.folder, segments=[{"started": last - HOUR}])
    assert run.status() == "died" and runfolder.costs(run.folder)["held_s"] == pytest.approx(HOUR, abs=0.01)
    runfolder.create(overlays.apply(run.config, {"checkpoint.resume": True}), run.folder)
    assert run.manifest["segments"] == [{"started": last - HOUR, "ended": last}], "and it goes on from there"


def test_a_price_that_was_corrected_counts_from_the_start(tmp_path):
    run = priced(tmp_path, [{"started": 0.0, "ended": HOUR}], price_per_hour=3.0, budget=None)
    assert runfolder.costs(run.folder) == {"price_per_hour": 3.0, "held_s": HOUR, "dollars": 3.0, "budget": None}


def test_without_a_price_nothing_is_claimed(tmp_path):
    found = runfolder.costs(write_run(tmp_path, []).folder)
    assert found == {"price_per_hour": None, "held_s": 0.0, "dollars": None, "budget": None}
    assert not cost.is_spent(CostConfig(budget=0.01), 1e9), "what costs nothing spends nothing"


@pytest.mark.parametrize(("seconds", "spent"), [(2.5 * HOUR - 1, False), (2.5 * HOUR, True)])
def test_a_budget_is_spent_by_the_second(seconds, spent):
    assert cost.is_spent(CostConfig(price_per_hour=2.0, budget=5.0), seconds) is spent
    assert not cost.is_spent(CostConfig(price_per_hour=2.0), seconds)


def test_how_busy_gpus_were_and_what_they_drew_stands_in_the_report(tmp_path):
    from upsnb.report import results

    readings = [[90.0, 80.0], [None, 100.0], [10.0, 70.0]]
    events = [{"kind": "telemetry", "step": n, "utilisation_percent": busy} for n, busy in enumerate(readings)]
    events += [{**step(n), "epoch": n // 10} for n in range(1, 45)]
    report = results.run_numbers(write_run(tmp_path, [{"kind": "start", "step": 0, **START}, *events]))
    assert report["gpu_utilisation_percent"] == {"mean": 70.0, "p10": pytest.approx(34.0)}
    assert "GPUs busy 70 % of the time, 34 % in its laziest tenth" in results.costs(report)
    assert report["epoch_s"] == pytest.approx(1.0), "ten steps of 0.1 s; the last epoch did not end"
    quiet = results.run_numbers(write_run(tmp_path / "cpu", [{"kind": "start", "step": 0, **START}]))
    assert quiet["gpu_utilisation_percent"] == {"mean": None, "p10": None} and quiet["epoch_s"] is None
    assert "GPUs" not in results.costs(quiet)


def test_report_table_and_text_tell_it(tmp_path):
    from upsnb.report import results

    run = priced(tmp_path / "run", [{"started": 0.0, "ended": HOUR}])
    report = results.train_report(run)
    assert report["cost"]["dollars"] == 2.0
    told = "held the machine for 3600 s: $2.00 of a budget of $5.00, at $2.00 an hour, start-up and pauses included"
    assert told in results.costs(report)
    assert table(tmp_path)["dollars"].tolist() == [2.0]


def test_a_run_that_has_spent_its_budget_saves_evaluates_and_goes_on_with_a_larger_one(
    tiny_config, train_here, tmp_path
):
    dear = {"stages.operator.epochs": 100_000, "cost.price_per_hour": 3600.0, "cost.budget": 1.0}
    events = train_here(tiny_config(("darcy",), **dear), tmp_path)
    (end,) = of(events, "end")
    assert end["reason"] == "budget" and end["step"] > 1
    assert checkpoint_index.is_there(tmp_path) and (tmp_path / runfolder.EVALUATION).exists()
    more = {**dear, "cost.budget": 1e6, "training.time_limit_s": 2.0, "checkpoint.resume": True}
    (_, second) = of(train_here(tiny_config(("darcy",), **more), tmp_path), "end")
    assert second["reason"] == "time" and second["step"] > end["step"]


def test_resuming_what_has_no_money_left_is_refused(tmp_path):
    from upsnb import commands

    run = priced(tmp_path, [{"started": 0.0, "ended": 3 * HOUR}])
    runfolder.update_manifest(run.folder, end_reason="budget")
    with pytest.raises(RunError, match=r"has spent its budget of \$5 -> go on in Python with a larger one"):
        commands.resume(str(run.folder))
