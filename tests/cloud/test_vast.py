"""Renting at Vast.ai with its real command, against a server that speaks its API: what is asked, and that it ends."""

import os
import shlex
import subprocess
from itertools import pairwise
from pathlib import Path

import pytest
from fake_vast import OFFER
from waiting import until

from upsnb import commands, overlays
from upsnb.__main__ import read_parameters
from upsnb.cloud import launches, vast
from upsnb.errors import ConfigError, RunError
from upsnb.overlays import project_root

FILTERED = ("num_gpus", "gpu_ram", "cuda_max_good", "compute_cap", "disk_space")
NOTEBOOK = project_root() / "notebooks/01_train.ipynb"
SMOKE = {"training.time_limit_s": 1800.0, "cost.budget": None}


@pytest.fixture
def config():
    return overlays.load(project_root() / "params/smoke.yaml", overrides=SMOKE)


# -- offers ------------------------------------------------------------------------------------------------------------


def test_the_query_asks_for_what_the_settings_need(cloud, config):
    wanted = vast.needs(config)
    rows = vast.offers(wanted)
    ((_, _, body),) = [asked for asked in cloud.asked if asked[1] == "/bundles"]
    asked = {name: {how: float(value) for how, value in body[name].items()} for name in FILTERED}
    assert asked["num_gpus"] == {"eq": 1} and body["rentable"] == {"eq": True}
    assert asked["gpu_ram"]["gte"] == pytest.approx(wanted["gpu_gib"] * 1024, rel=0.01), "Vast counts MiB"
    assert asked["cuda_max_good"] == {"gte": vast.WHEEL_CUDA} and asked["compute_cap"] == {"gte": 750}
    assert asked["disk_space"]["gte"] == wanted["disk_gb"] == body["allocated_storage"]
    assert [row["id"] for row in rows] == [OFFER["id"]]


@pytest.mark.slow
def test_more_ranks_and_bf16_need_more_gpus_and_newer_ones_and_a_wider_model_more_memory(config):
    halves = {"training.num_gpus": 4, "training.amp": True, "training.amp_dtype": "bfloat16"}
    four = vast.needs(overlays.apply(config, halves))
    assert four["num_gpus"] == 4 and four["capability"] == 8.0
    assert "pcie_bw>=10" in vast.query(four).split() and "pcie_bw" not in vast.query(vast.needs(config))
    wide = overlays.apply(config, {"operator.pdet.hidden_dim": 512, "operator.pdet.depth": 8})
    assert vast.needs(wide)["gpu_gib"] > vast.needs(config)["gpu_gib"] + 0.1
    with pytest.raises(ConfigError, match="training.device"):
        vast.needs(overlays.apply(config, {"training.device": "cpu"}))


def test_published_files_are_room_and_traffic_and_memory_is_not_guessed_without_them(config, tmp_path):
    away = {"data.root": str(tmp_path), "data.download": "missing"}
    whole = vast.needs(overlays.load(project_root() / "params/pdebench_full.yaml", overrides=away))
    assert whole["data_gb"] > 5 and whole["disk_gb"] > vast.needs(config)["disk_gb"] + 5
    assert whole["gpu_gib"] is None and "gpu_ram" not in vast.query(whole)


def test_the_cheapest_for_the_whole_run_comes_first_not_the_cheapest_by_the_hour(cloud, config):
    cloud.offers = [
        OFFER | {"id": 1, "dph_total": 1.0, "inet_down_cost": 0.5},
        OFFER | {"id": 2, "dph_total": 1.5, "inet_down_cost": 0.0},
        OFFER | {"id": 3, "dph_total": 9.0},
    ]
    wanted = vast.needs(config)
    rows = vast.offers(wanted, budget=3.0)
    assert [row["id"] for row in rows] == [2, 1, 3]
    assert rows[0]["dollars"] == pytest.approx(1.5 * (0.5 + vast.START_H)) and rows[0]["hours_for_budget"] == 2.0
    stages = {"stages.finetune.epochs": 9, "stages.finetune.time_limit_s": 1800.0}
    assert vast.needs(overlays.apply(config, stages))["hours"] == 1.0, "of all stages"
    by_epochs = vast.needs(overlays.apply(config, {"training.time_limit_s": None}))
    cloud.offers[1] = cloud.offers[1] | {"total_flops": 90.0}
    assert [row["id"] for row in vast.offers(by_epochs)] == [2, 1, 3], "most operations for a dollar"


def test_a_bid_is_above_the_lowest_and_no_dearer_than_asked_and_its_price_has_the_disk_in_it(cloud, config, tmp_path):
    wanted = vast.needs(config)
    (row,) = vast.offers(wanted, interruptible=True)
    ((_, _, body),) = [asked for asked in cloud.asked if asked[1] == "/bundles"]
    assert body["type"] == "bid"
    assert row["bid"] == pytest.approx(0.5) and row["price_per_hour"] == pytest.approx(0.55)
    assert not vast.offers(wanted, max_price=0.5, interruptible=True), "the lowest bid would be: 0.45"
    (planned,) = launches.plan(wanted, 5.0, interruptible=True)
    vast.create(vast.create_command(planned["offer"], wanted, "upsnb-x", _script(cloud), vast.IMAGE), "upsnb-x")
    assert cloud.instances[7000]["bid"] == pytest.approx(0.5)
    (planned,) = launches.plan(wanted, 5.0)
    vast.create(vast.create_command(planned["offer"], wanted, "upsnb-y", _script(cloud), vast.IMAGE), "upsnb-y")
    assert cloud.instances[7001]["bid"] is None, "on demand"


@pytest.mark.parametrize(
    "budget, offer, offers, said",
    [
        (0.1, None, [OFFER], "before anything trains"),
        (5.0, 999, [OFFER], "offer 999"),
        (5.0, None, [], "no offer has what is needed"),
    ],
)
def test_what_cannot_be_rented_is_said_before_anything_is(cloud, config, budget, offer, offers, said):
    cloud.offers = offers
    with pytest.raises(RunError, match=said):
        launches.plan(vast.needs(config), budget, offer)
    assert not cloud.instances


def test_several_instances_take_an_offer_each_and_a_share_of_the_sweep_and_of_the_budget(
    cloud, config, monkeypatch, capsys
):
    cloud.offers, started = [OFFER | {"id": number} for number in (1, 2, 3)], []

    def start(planned, notebook, given, *rest):
        started.append((planned["offer"]["id"], given["share"], planned["limit_s"]))
        return Path(f"run{len(started)}")

    monkeypatch.setattr(launches, "start_rented", start)
    sweep, alone = Path("11_sweep.ipynb"), launches.plan(vast.needs(config), 5.0)[0]["limit_s"]
    how = {"offer": None, "max_price": None, "image": None, "resume": None}
    commands.cloud_launch((sweep, {}, config), 15.0, **how, sure=False, instances=3)
    assert capsys.readouterr().out.count("create instance") == 3 and not started
    commands.cloud_launch((sweep, {}, config), 15.0, **how, sure=True, instances=3)
    assert sorted(one[0] for one in started) == [1, 2, 3] and [one[1] for one in started] == ["1/3", "2/3", "3/3"]
    assert all(one[2] == pytest.approx(alone) for one in started)
    with pytest.raises(RunError, match="3 offers have what is needed"):
        commands.cloud_launch((sweep, {}, config), 20.0, **how, sure=True, instances=4)
    with pytest.raises(RunError, match="share out the trainings of 11_sweep"):
        commands.cloud_launch((Path("01_train.ipynb"), {}, config), 15.0, **how, sure=True, instances=3)
    assert len(started) == 3, "nothing of what cannot be"


def test_a_wrong_key_is_said_with_its_remedy_and_is_in_no_message(cloud, config, monkeypatch):
    monkeypatch.setenv("VAST_API_KEY", "wrong-secret")
    with pytest.raises(RunError, match="401.*set api-key") as raised:
        vast.offers(vast.needs(config))
    assert "wrong-secret" not in str(raised.value)


def test_a_survey_says_why_there_are_no_offers_and_the_line_to_type_makes_the_same_settings(
    config, tmp_path, monkeypatch
):
    monkeypatch.setattr(vast, "COMMAND", "nowhere/vastai")
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    report = launches.survey(config, 5.0, None, tmp_path)
    assert "is not installed" in report["trouble"] and launches.offered(report["offers"]).empty
    assert "no offers: vastai: is not installed" in launches.summary(report)
    for preset in ("smoke", ""):  # a params file that starts from nothing names none
        words = shlex.split(launches.line(preset, config, 5.0))
        params = [value for flag, value in pairwise(words) if flag == "-p"]
        assert read_parameters(NOTEBOOK, [], params)[1] == config


# -- the switch --------------------------------------------------------------------------------------------------------


def boot(cloud, limit_s: float) -> dict:
    cloud.rent(1, {"label": "test", "onstart": vast.onstart(limit_s)})
    return next(iter(cloud.instances.values()))


def test_it_fits_into_what_vast_takes_and_its_first_act_is_the_trap():
    script = vast.onstart(86400.0)
    assert len(script.encode()) < vast.ONSTART_BYTES
    switch = script.split("<<'SWITCH'\n")[1].split("\nSWITCH")[0]
    assert subprocess.run(["bash", "-n"], input=switch, text=True).returncode == 0
    assert switch.index("trap stop EXIT") < switch.index("while sleep")


def test_an_instance_stops_itself_when_its_time_is_over_whatever_the_server_says_at_first(cloud):
    cloud.trouble["PUT /instances/N"] = [503, 500]
    instance = boot(cloud, limit_s=3)
    until(lambda: instance["actual_status"] == "exited")
    stopped = [body for method, path, body in cloud.asked if method == "PUT"]
    assert stopped == [{"state": "stopped"}] * 3
    assert int((Path(vast.PLACE) / "held").read_text()) >= 3


def test_time_held_counts_on_after_a_start_which_gets_time_for_a_pull_and_no_more(cloud):
    instance = boot(cloud, limit_s=4)
    until(lambda: instance["actual_status"] == "exited")
    cloud.boot(instance["id"])
    until(lambda: instance["actual_status"] == "exited")
    assert int((Path(vast.PLACE) / "held").read_text()) == 4 + 2, "not another four seconds"


def test_what_trained_before_a_start_does_not_count_as_training(cloud, near, monkeypatch):
    """Its process number is another process's by then: here this one's."""
    monkeypatch.setattr(vast, "IDLE_S", 2)
    run = Path(vast.PLACE) / "waves"
    run.mkdir(parents=True)
    (run / "process").write_text(str(os.getpid()))
    instance = boot(cloud, limit_s=1000)
    until(lambda: instance["actual_status"] == "exited")
    assert near.state("waves").startswith("stopped")


def test_an_instance_on_which_nothing_happens_stops_itself_and_one_that_trains_does_not(cloud, monkeypatch):
    monkeypatch.setattr(vast, "IDLE_S", 3)
    place = Path(vast.PLACE)
    instance = boot(cloud, limit_s=1000)
    until((place / "armed").exists)
    training = subprocess.Popen(["sleep", "8"])
    (place / "run").mkdir()
    (place / "run/process").write_text(str(training.pid))
    training.wait()
    assert instance["actual_status"] == "running", "though nobody asked for anything for eight seconds"
    (place / "run/exit_code").write_text("0")
    until(lambda: instance["actual_status"] == "exited")


def test_a_switch_that_is_killed_politely_stops_the_instance(cloud):
    instance = boot(cloud, limit_s=1000)
    until((Path(vast.PLACE) / "armed").exists)
    subprocess.run(["pkill", "-TERM", "-f", f"{vast.PLACE}/switch"], check=True)
    until(lambda: instance["actual_status"] == "exited")


# -- renting -----------------------------------------------------------------------------------------------------------


def test_nothing_is_rented_twice_when_the_answer_is_lost(cloud, config):
    cloud.trouble["PUT /asks/N"] = ["done and lost"]
    (planned,) = launches.plan(vast.needs(config), 5.0)
    arguments = vast.create_command(planned["offer"], planned["needs"], "upsnb-x", _script(cloud), vast.IMAGE)
    assert vast.create(arguments, "upsnb-x") in cloud.instances
    assert len(cloud.instances) == 1


def test_an_offer_that_somebody_else_took_is_an_error_and_rents_nothing(cloud, config):
    cloud.trouble["PUT /asks/N"] = [400]
    (planned,) = launches.plan(vast.needs(config), 5.0)
    arguments = vast.create_command(planned["offer"], planned["needs"], "upsnb-x", _script(cloud), vast.IMAGE)
    with pytest.raises(RunError, match="trouble 400"):
        vast.create(arguments, "upsnb-x")
    assert not cloud.instances


def _script(cloud) -> Path:
    path = cloud.place / "given.sh"
    path.write_text(vast.onstart(1000.0))
    return path


def start(config):
    (planned,) = launches.plan(vast.needs(config), 5.0)
    return launches.start_rented(planned, NOTEBOOK, {}, config, say=lambda line: None)


@pytest.mark.slow
@pytest.mark.parametrize(
    "trouble",
    [
        "cannot stop itself",
        *(pytest.param(t, marks=pytest.mark.long) for t in ("never boots", "vanishes", "no Python")),
    ],
)
def test_whatever_fails_before_it_trains_the_instance_is_destroyed(cloud, config, kept, near, monkeypatch, trouble):
    monkeypatch.setattr(vast, "BOOT_S", 3.0)
    if trouble == "never boots":
        cloud.boots, said = False, "loading"
    elif trouble == "vanishes":
        monkeypatch.setattr(vast, "LOOK_S", 1.0)
        cloud.boots = False
        rent = cloud.rent
        cloud.rent = lambda *given: (rent(*given), cloud.instances.clear())[0]
        said = "is gone"
    elif trouble == "cannot stop itself":
        monkeypatch.setattr(vast, "onstart", lambda limit_s: "true\n")
        said = "switch has not reached Vast"
    else:
        monkeypatch.setattr(vast.Host, "install", _no_python)
        said = "no Python"
    with pytest.raises(RunError, match=said):
        start(config)
    assert not cloud.instances and not list(kept.iterdir())


def _no_python(self, name):
    raise RunError("no Python 3.11 to 3.14 -> install one there")


@pytest.mark.long
def test_one_that_cannot_be_destroyed_is_named_and_not_forgotten(cloud, config, monkeypatch, near, kept):
    monkeypatch.setattr(vast, "BOOT_S", 1.0)
    monkeypatch.setattr(vast, "onstart", lambda limit_s: "true\n")
    cloud.trouble["DELETE /instances/N"] = [500, 500, 500, 500]
    with pytest.raises(RunError, match="trouble 500"):
        start(config)
    assert 7000 in cloud.instances and "instance 7000" in launches.status(next(kept.iterdir()).name)
