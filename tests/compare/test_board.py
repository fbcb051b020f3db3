"""The leaderboard: who stands on it, next to whom, and in which order."""

import json

import pandas as pd
import pytest
from made_runs import CONFIG, END, START, TOKENS, step, write_run

from upsnb import overlays
from upsnb.compare import board, board_pages
from upsnb.errors import RunError
from upsnb.runs import runfolder

TERMS = {
    "metrics": 1, "split": "test", "samples": 3, "data": "ab12", "frames given": 4, "frames forecast": 6,
    "training data": "9 samples, 0 +- 1",
}  # fmt: skip
CHANGED = {"kind": "flip", "step": 2, "revision": 1, "applied": True, "changes": {"training.compile": True}}
OPENED = {"kind": "opened", "step": 3, "split": "test", "weights": "last"}


def make(folder, nrmse=0.1, name="fno", seed=42, lookup=0.5, split="test", extra=(), terms=None, end=True, **how):
    """A run of one dataset that takes 10 s; `terms` are what it is judged by, over TERMS."""
    settings = {"logging.name": name, "training.seed": seed, **how.pop("settings", {})}
    events = [{"kind": "segment", "step": 0, "number": 0}, {"kind": "start", "step": 0, **START}]
    events += [step(1), step(2), step(3), *extra, *([OPENED] if split == "test" else [])]
    result = {
        "num_samples": 3, "nrmse_mean": nrmse, "rollout_nrmse_mean": nrmse, "rollout_nrmse_median": 0.5 * (nrmse or 0),
        "rollout_vrmse": 0.2, "persistence_nrmse_mean": 0.8, "rollout_persistence_nrmse_mean": 0.9,
        "rollout_training_mean_nrmse_mean": 0.7, "rollout_lookup_nrmse_mean": lookup,
        "per_time": {"rollout_nrmse": [0.1, 0.1, 0.2, 0.2, 0.3, None]},
    }  # fmt: skip
    if terms is not False:
        result["protocol"] = {**TERMS, **(terms or {})}
    evaluation = {"format": 1, "split": split, "weights": "last", "datasets": {"waves": {split: result}}}
    events += [{"kind": "end", "step": 3, **END}] if end else []
    run = write_run(folder, events, config=overlays.apply(CONFIG, settings), evaluation=end and evaluation, **how)
    runfolder.update_manifest(run.folder, end_reason="epochs")
    return run


def seeds(root, name, errors, **how):
    for seed, nrmse in enumerate(errors):  # of a model as wide as its name is long
        settings = {"latent.dim": 8 * len(name)}
        make(root / f"{name}-{seed}", nrmse, name, seed, settings=settings, **how)


def rows(report):
    (table,) = report["tables"]
    return {row["entry"]: row for row in table["datasets"]["waves"]["rows"]}


def test_models_are_ranked_as_far_as_their_intervals_tell_them_apart(tmp_path):
    seeds(tmp_path, "good", (0.10, 0.12, 0.14))
    seeds(tmp_path, "alike", (0.13, 0.15, 0.17))
    seeds(tmp_path, "poorer", (0.20, 0.21, 0.22))
    found = rows(board.board([tmp_path]))
    assert [*found] == ["good", "alike", "poorer"]
    assert [row["rank"] for row in found.values()] == [1, 1, 3], "0.13 to 0.14 may be either's"
    assert found["good"]["nrmse"] == {"median": 0.12, "ci95": [0.10, 0.14]}


def test_few_seeds_and_what_a_look_up_does_as_well_have_no_rank(tmp_path):
    seeds(tmp_path, "good", (0.10, 0.12, 0.14))
    seeds(tmp_path, "short", (0.01, 0.01))
    seeds(tmp_path, "lookup", (0.5, 0.5, 0.6))
    make(tmp_path / "again", 0.01, "short", seed=1, settings={"latent.dim": 40})
    found = rows(board.board([tmp_path]))
    assert (found["good"]["rank"], found["short"]["rank"], found["lookup"]["rank"]) == (1, None, None)
    assert found["short"]["no_rank"] == "2 of 3 seeds", "the same seed twice is one"
    assert found["lookup"]["no_rank"] == "no better than a look-up"


def test_failed_and_diverged_runs_are_counted(tmp_path):
    seeds(tmp_path, "fno", (0.10, 0.12, 0.14, None))
    lost = {"name": "fno", "seed": 9, "settings": {"latent.dim": 24}}
    make(tmp_path / "lost", **lost, end=False, status="failed", cause="rank 0 raised ValueError")
    make(tmp_path / "other", name="other", settings={"optimizer.lr": 0.5}, end=False, status="failed", cause="no")
    report = board.board([tmp_path])
    (row,) = rows(report).values()
    assert (row["rank"], row["failed"], row["diverged"], len(row["seeds"])) == (1, 1, 1, 3)
    assert [*report["left_out"]] == ["failed: rank 0 raised ValueError", "failed: no"]


@pytest.mark.parametrize(
    "other",
    [
        {"terms": {"data": "cd34"}},
        {"terms": {"frames given": 10}},
        {"terms": {"metrics": 2}},
        {"terms": {"training data": "90 samples, 0 +- 1"}},
        {"settings": {"stages.operator.epochs": 77}},
        {"settings": {"training.time_limit_s": 60.0}},
        {"settings": {"model.pretrained": "another-run"}},
    ],
    ids=str,
)
def test_runs_of_two_protocols_share_no_table(tmp_path, other):
    one, two = make(tmp_path / "one"), make(tmp_path / "two", **other)
    report = board.board([tmp_path])
    assert len(report["tables"]) == 2 and len(report["tables"][1]["differs"]) == 1
    with pytest.raises(RunError, match="one and .*two cannot be ranked together: [^;]* and [^;]* -> "):
        board.board([one.folder, two.folder])


def test_of_two_protocols_that_share_nothing_a_few_differences_are_told(tmp_path):
    one, two = make(tmp_path / "one"), make(tmp_path / "two", terms=dict.fromkeys(TERMS, "other"))
    with pytest.raises(RunError, match="; 4 more differences -> "):
        board.board([one.folder, two.folder])


def test_what_says_nothing_of_a_model_makes_no_other_model(tmp_path):
    settings = {"checkpoint.interval": 7, "data.root": "elsewhere", "evaluation.samples_per_call": 2}
    for seed in range(3):
        make(tmp_path / str(seed), seed=seed, name=f"run{seed}", settings=settings if seed else {})
    assert len(rows(board.board([tmp_path]))) == 1
    make(tmp_path / "wide", name="run2", settings={"latent.dim": 7})
    assert {*rows(board.board([tmp_path]))} == {"run2: dim 128", "run2: dim 7"}, "one name, two models"


@pytest.mark.parametrize(
    ("why", "how"),
    [
        (
            "was changed while it trained",
            {"extra": [CHANGED]},
        ),
        ("has no errors of the test split", {"split": "validation"}),
        ("does not say what it is judged by", {"terms": False}),
        ("is still starting", {"status": "starting"}),
        ("was cut short", {"end_reason": "stopped"}),
    ],
)
def test_what_cannot_be_believed_stands_on_no_board_and_says_why(tmp_path, why, how):
    ended = how.pop("end_reason", None)
    run = make(tmp_path / "bad", **how)
    if ended:
        runfolder.update_manifest(run.folder, end_reason=ended)
    with pytest.raises(RunError, match=f"no run can stand on a board: {why}.*bad"):
        board.board([tmp_path])
    make(tmp_path / "good")
    (reason,) = board.board([tmp_path])["left_out"]
    assert why in reason


def test_a_damaged_folder_spoils_no_board(tmp_path):
    make(tmp_path / "good")
    (make(tmp_path / "bad").folder / "config.yaml").write_text("format: 9")
    assert "cannot be read: " in board.summary(board.board([tmp_path]))


def test_where_a_split_leaks_distinct_samples_judge(tmp_path):
    run = make(tmp_path / "one")
    path = run.folder / "evaluation.json"
    found = json.loads(path.read_text())
    result = found["datasets"]["waves"]["test"]
    distinct = {key: value for key, value in result.items() if key != "per_time"}
    distinct |= {"num_samples": 2, "rollout_nrmse_mean": 0.4}
    result["leak"] = {"near": 1, "seen": 1, "distinct": distinct}
    path.write_text(json.dumps(found))
    report = board.board([tmp_path])
    (row,) = rows(report).values()
    assert row["nrmse"]["median"] == 0.4 and row["quality"]["first third"] is None, "windows are of all samples"
    assert report["tables"][0]["protocol"]["waves: samples that training has not seen"] == 2


def test_runs_of_another_machine_are_marked(tmp_path):
    make(tmp_path / "here")
    make(tmp_path / "tagged", seed=1).annotate(tags=["imported"])
    runfolder.update_manifest(make(tmp_path / "there", seed=2).folder, host="faraway")
    (row,) = rows(board.board([tmp_path])).values()
    assert "here" in row["origin"] and "imported from faraway" in row["origin"] and row["origin"].count("imported") == 2


def test_every_look_at_the_test_split_is_counted(tmp_path):
    make(tmp_path / "one", extra=[OPENED, OPENED])
    make(tmp_path / "flipped", extra=[CHANGED])
    (table,) = board.board([tmp_path])["tables"]
    assert table["opened"] == 4, "by runs that have no rank as well"
    assert table["datasets"]["waves"]["rows"][0]["opened"] == 3


def test_costs_and_what_is_reached_without_a_model_stand_beside(tmp_path):
    telemetry = [{"kind": "telemetry", "step": n, "power_w": [100.0, 200.0]} for n in range(2)]
    run = make(tmp_path / "one", extra=telemetry)
    path = run.folder / "events.jsonl"
    events = [json.loads(line) for line in path.read_text().splitlines()]
    for number, event in enumerate(e for e in events if e["kind"] == "telemetry"):
        event["time"] = 1e9 + 6 * number
    path.write_text("".join(json.dumps(event) + "\n" for event in events))
    report = board.board([tmp_path], price_per_hour=360.0)
    (row,) = rows(report).values()
    assert (row["energy_wh"], row["cost_dollars"]) == (pytest.approx(300 * 6 / 3600), pytest.approx(0.95))
    assert (row["train_time_s"], row["peak_memory_gib"]) == (9.5, 0.5) and " cores of " in row["device"]
    assert row["quality"]["first third"] == pytest.approx(0.1) and row["quality"]["median"] == 0.05
    assert row["quality"]["last third"] is None, "one of its frames is no number"
    found = report["tables"][0]["datasets"]["waves"]["references"]
    assert found == {"persistence": 0.9, "training mean": 0.7, "look-up": 0.5}


def test_page_csv_and_tables_say_the_same(tmp_path):
    seeds(tmp_path / "runs", "<b>&", (0.10, 0.12, 0.14))
    report = board.board([tmp_path / "runs"])
    (title, ranking), (_, costs) = board_pages.tables(report).items()
    beside = report["tables"][0]["datasets"]["waves"]["references"]
    assert title.startswith("waves: ranking (protocol ") and list(ranking.index) == ["<b>&", *beside]
    assert list(ranking["rank"])[0] == "1" and list(costs.index) == ["<b>&"], "what is no model costs nothing"
    assert "energy [Wh]" not in costs, "nobody knows it"
    page, csv, _ = board_pages.write(report, tmp_path / "board")
    text, frame = page.read_text(), pd.read_csv(csv)
    assert (
        "&lt;b&gt;&amp;" in text and "<b>" not in text and "0.12" in text and "look-up" in text and "http" not in text
    )
    assert all(f"<dt>{name}</dt>" in text for name in (*ranking, *costs)), "each column is explained"
    assert tuple(frame.loc[0, ["rank", "nRMSE", "95 % low", "95 % high"]]) == (1, 0.12, 0.10, 0.14), (
        "numbers, as they are"
    )


def test_a_board_of_another_workload_calls_its_error_by_its_name(of_tokens, tmp_path):
    seeds(tmp_path / "runs", "decoder", (7.0, 8.0, 9.0))
    for number, path in enumerate(sorted(tmp_path.glob("runs/*/evaluation.json"))):
        found = json.loads(path.read_text())
        own = {"num_samples": 3, "error": 7.0 + number, "baseline": "unigrams", "baseline_error": 99.0}
        found["datasets"]["waves"]["test"] = {**own, "protocol": TERMS}
        path.write_text(json.dumps(found))
    report = board.board([tmp_path / "runs"])
    page, csv, _ = board_pages.write(report, tmp_path / "board")
    ranking = board_pages.tables(report)[f"waves: ranking (protocol {report['tables'][0]['id']})"]
    assert ranking["perplexity"].to_dict() == {"decoder": "8", "unigrams": "99"} and ranking["rank"].iloc[0] == "1"
    assert "<dt>perplexity</dt>" in page.read_text() and "(perplexity without a model: " in board.summary(report)
    assert "nRMSE" not in page.read_text() + csv.read_text() + board.summary(report)


def test_errors_of_two_names_share_no_table(tmp_path):
    make(tmp_path / "one")
    make(tmp_path / "two", extra=[{"kind": "start", "step": 3, **START, **TOKENS}])
    tables = board.board([tmp_path])["tables"]
    assert {table["protocol"].get("metric") for table in tables} == {None, "perplexity"}
    named = ["nRMSE" in board_pages.columns(table)["ranking"] for table in tables]
    assert sorted(named) == [False, True]
