"""What GPUs say of themselves, as events of rank 0; the driver is played by functions."""

import threading

import torch
from waiting import until

from upsnb.runs import events as wire
from upsnb.training.parallel import Ranks
from upsnb.worker import telemetry

GPU = Ranks(device=torch.device("cuda"))  # a name; no CUDA call is made


def refuse(device):
    raise RuntimeError("Not Supported")


def sample_for_a_moment(folder, monkeypatch, ranks, readings) -> list[dict]:
    monkeypatch.setattr(telemetry, "READINGS", readings)
    writer = wire.EventWriter(folder)
    with telemetry.telemetry(ranks, writer, lambda: 7, every_s=0.01):
        if "telemetry" in threads():
            until(lambda: wire.read_events(folder, ("telemetry",)))
    assert "telemetry" not in threads()
    writer.close()
    return wire.read_events(folder)


def threads() -> set[str]:
    return {thread.name for thread in threading.enumerate()}


def test_every_local_gpu_is_read_in_its_unit_under_the_current_step(tmp_path, monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    readings = {"utilisation_percent": (lambda d: 90 + d, 1.0), "power_w": (lambda d: 300_000, 1e-3)}
    said = sample_for_a_moment(tmp_path, monkeypatch, GPU, readings)
    assert said and all(event["kind"] == "telemetry" and event["step"] == 7 for event in said)
    assert said[0]["utilisation_percent"] == [90, 91] and said[0]["power_w"] == [300, 300]


def test_a_reading_the_driver_refuses_is_missing_and_said_once(tmp_path, monkeypatch):
    readings = {"utilisation_percent": (refuse, 1.0), "clock_mhz": (lambda d: 1410, 1.0)}
    warning, *said = sample_for_a_moment(tmp_path, monkeypatch, GPU, readings)
    assert warning["kind"] == "warning" and "utilisation_percent: Not Supported" in warning["message"]
    assert said and all(e["utilisation_percent"] == [None] and e["clock_mhz"] == [1410] for e in said)


def test_a_machine_that_tells_nothing_gets_a_warning_and_no_thread(tmp_path, monkeypatch):
    (warning,) = sample_for_a_moment(tmp_path, monkeypatch, GPU, {"power_w": (refuse, 1.0)})
    assert warning["kind"] == "warning"


def test_cpu_runs_and_other_ranks_write_nothing(tmp_path, monkeypatch):
    readings = {"power_w": (lambda d: 1, 1.0)}
    for ranks in (Ranks(), Ranks(rank=1, world_size=2, device=torch.device("cuda"))):
        assert sample_for_a_moment(tmp_path, monkeypatch, ranks, readings) == []
