"""A run that was stopped and continued is the run that was never stopped; what is damaged is not trusted."""

import json
import os
import pickle

import numpy as np
import pytest
import torch

from upsnb import checkpoint, overlays, runfolder
from upsnb.errors import RunError

EVERYTHING = {  # all that draws at random or remembers
    "operator.pdet.drop_path": 0.3,
    "training.noise": 0.1,
    "training.ema_decay": 0.9,
    "training.query_sampling.num_queries": 24,
    "training.lambda_inv_enc": 0.1,
    "training.inverse_loss_frequency": 2,
    "data.datasets.advection.augment": True,
    "data.datasets.darcy.augment": True,
    "stages.operator.epochs": 2,
    "stages.operator.scheduler.name": "plateau",
    "stages.operator.scheduler.plateau_patience": 1,
    "checkpoint.interval": 10,
}


class Killed(Exception):
    """Stands for a process that is gone."""


def losses(events):
    """{step: loss}, the last one written of each step."""
    return {event["step"]: event["loss"] for event in events if event["kind"] == "step"}


def expect_same_state(first, second):
    """Equal bit for bit, wherever there is a tensor."""
    if isinstance(first, torch.Tensor):
        assert torch.equal(first, second)
    elif isinstance(first, dict):
        assert first.keys() == second.keys()
        for key in first:
            expect_same_state(first[key], second[key])
    elif isinstance(first, (list, tuple)):
        assert len(first) == len(second)
        for one, other in zip(first, second):
            expect_same_state(one, other)
    else:
        assert first == second


# -- resuming ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("residency", ("device", "workers"))
@pytest.mark.parametrize("ending", ("stopped", "killed"))
def test_a_continued_run_is_the_run_that_was_never_stopped(tiny_config, train_here, tmp_path, residency, ending):
    config = tiny_config(**EVERYTHING, **{"data.residency": residency})
    whole = losses(train_here(config, tmp_path / "whole"))
    folder = tmp_path / "parts"

    def interrupt(step):
        if step == 13 and ending == "stopped":
            runfolder.write_control(folder, None, runfolder.STOP)
        if step == 13 and ending == "killed":
            raise Killed

    try:
        train_here(config, folder, interrupt)
    except Killed:
        pass
    kept = checkpoint.load(folder)["step"]
    assert kept == (14 if ending == "stopped" else 10)  # in the middle of the first epoch either way
    (folder / runfolder.CONTROL).unlink(missing_ok=True)
    events = train_here(overlays.apply(config, {"checkpoint.resume": True}), folder)
    assert losses(events) == whole and len(whole) == 80
    states = [checkpoint.load(path)["setup"] for path in (tmp_path / "whole", folder)]
    expect_same_state(*states)
    evals = [
        [(event["step"], event["val_nrmse"]) for event in runfolder.read_events(path, ("eval",))]
        for path in (tmp_path / "whole", folder)
    ]
    assert evals[0] == evals[1]


def test_resuming_a_finished_run_trains_no_further(tiny_config, train_here, tmp_path):
    config = tiny_config(("darcy",), **{"checkpoint.resume": True})
    train_here(config, tmp_path)
    before = checkpoint.load(tmp_path)
    events = train_here(config, tmp_path)
    assert [event["reason"] for event in events if event["kind"] == "end"] == ["epochs", "epochs"]
    expect_same_state(before["setup"]["model"], checkpoint.load(tmp_path)["setup"]["model"])


def test_without_resume_a_run_starts_anew(tiny_config, train_here, tmp_path):
    config = tiny_config(("darcy",))
    first = losses(train_here(config, tmp_path))
    again = [event for event in train_here(config, tmp_path) if event["kind"] == "step"]
    assert [event["step"] for event in again] == 2 * sorted(first)


@pytest.mark.parametrize(
    "change",
    (
        {"training.accum_steps": 3},
        {"training.amp": True, "training.amp_dtype": "float16"},
        {"training.amp": True, "training.amp_dtype": "bfloat16"},
        {"training.batch_size": 16},
        {"training.ema_decay": 0.5},
        {"training.compile": False, "data.residency": "workers"},
    ),
    ids=lambda change: ", ".join(f"{key.split('.')[-1]} {value}" for key, value in change.items()),
)
def test_a_run_continues_under_another_config(tiny_config, train_here, tmp_path, change):
    config = tiny_config(**{"stages.operator.epochs": 2})
    train_here(
        config, tmp_path, lambda step: runfolder.write_control(tmp_path, None, runfolder.STOP) if step == 4 else None
    )
    (tmp_path / runfolder.CONTROL).unlink()
    events = train_here(overlays.apply(config, {"checkpoint.resume": True, **change}), tmp_path)
    assert events[-1]["kind"] == "end" and min(e["step"] for e in events[-5:]) > 5
    steps = [event["step"] for event in events if event["kind"] == "step"]
    assert steps == list(range(1, len(steps) + 1))


def test_a_continued_run_follows_its_new_optimizer_settings(tiny_setup):
    old = tiny_setup(**{"optimizer.lr": 1e-3, "optimizer.weight_decay": 0.3})
    batches = list(old.loader.epoch(0))[:2]
    old.step(batches, 0, 0)
    new = tiny_setup(**{"optimizer.lr": 5e-4, "optimizer.weight_decay": 0.01, "optimizer.betas": [0.8, 0.9]})
    new.load_state_dict(old.state_dict())
    for optimizer, before in zip(new.optimizers, old.optimizers):
        for group in optimizer.param_groups:
            assert group["peak_lr"] == 5e-4 and group["weight_decay"] in (0.01, 0.0)
            assert group.get("betas", (0.8, 0.9)) == (0.8, 0.9)
        expect_same_state(optimizer.state_dict()["state"], before.state_dict()["state"])


def test_averaging_that_starts_late_starts_from_the_loaded_weights(tiny_setup):
    old = tiny_setup()
    for value in old.model.parameters():
        value.data += 1.0
    new = tiny_setup(**{"training.ema_decay": 0.9})
    new.load_state_dict(old.state_dict())
    assert all(torch.equal(average, p) for average, p in zip(new.ema.average, new.model.parameters()))


# -- files -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path):
    """A run folder with checkpoints of steps 1 (the best), 2, 3 and 4."""
    for step in range(1, 5):
        checkpoint.save(tmp_path, {"step": step, "weights": torch.full((64,), float(step))}, best=step == 1)
    return tmp_path


def files(folder):
    return sorted(path.name for path in (folder / "checkpoints").glob("*.pt"))


def path_of(folder, step):
    return folder / "checkpoints" / f"step-{step:08d}.pt"


def test_latest_previous_and_best_are_kept_and_others_dropped(folder):
    assert files(folder) == [path_of(folder, step).name for step in (1, 3, 4)]
    assert checkpoint.load(folder)["step"] == 4 and checkpoint.load(folder, "best")["step"] == 1
    checkpoint.save(folder, {"step": 5}, best=True)
    assert files(folder) == [path_of(folder, step).name for step in (4, 5)]


def test_a_folder_without_checkpoints_has_none(tmp_path):
    assert checkpoint.load(tmp_path) is None and checkpoint.load(tmp_path, "best") is None


def test_saving_a_step_twice_keeps_the_one_before_it(folder):
    checkpoint.save(folder, {"step": 4, "weights": torch.zeros(1)}, best=False)
    assert checkpoint.load(folder)["weights"].tolist() == [0.0]
    path_of(folder, 4).unlink()
    assert checkpoint.load(folder)["step"] == 3


def damage(path, how):
    data = path.read_bytes()
    if how == "truncated":
        path.write_bytes(data[: len(data) // 2])
    elif how == "emptied":
        path.write_bytes(b"")
    elif how == "missing":
        path.unlink()
    else:  # one bit of a weight
        middle = data.rindex(np.full(64, float(path.stem[-1]), dtype=np.float32).tobytes()) + 10
        path.write_bytes(data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :])


@pytest.mark.parametrize("how", ("truncated", "emptied", "missing", "bit flipped"))
def test_a_damaged_latest_falls_back_to_the_one_before(folder, how):
    damage(path_of(folder, 4), how)
    assert checkpoint.load(folder)["step"] == 3
    damage(path_of(folder, 3), how)
    assert checkpoint.load(folder)["step"] == 1


def test_when_all_are_damaged_the_error_names_them(folder):
    for step in (1, 3, 4):
        damage(path_of(folder, step), "truncated")
    with pytest.raises(RunError, match="step-00000004.pt does not match.*step-00000003.pt.*step-00000001.pt"):
        checkpoint.load(folder)


def test_a_damaged_best_is_not_replaced_by_another(folder):
    damage(path_of(folder, 1), "bit flipped")
    with pytest.raises(RunError, match="step-00000001"):
        checkpoint.load(folder, "best")


def test_a_save_that_dies_leaves_the_old_state(folder, monkeypatch):
    def dies(state, file):
        file.write(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch, "save", dies)
    with pytest.raises(OSError, match="No space"):
        checkpoint.save(folder, {"step": 5}, best=True)
    assert checkpoint.load(folder)["step"] == 4 and checkpoint.load(folder, "best")["step"] == 1
    assert not [path for path in (folder / "checkpoints").iterdir() if path.name.startswith(".")]


def test_a_half_written_file_of_a_killed_process_is_ignored(folder):
    (folder / "checkpoints" / f".step-00000005.pt.{os.getpid() + 1}").write_bytes(b"half")
    assert checkpoint.load(folder)["step"] == 4
    checkpoint.save(folder, {"step": 5}, best=False)
    assert checkpoint.load(folder)["step"] == 5


def test_a_file_that_is_not_in_the_index_yet_is_ignored(folder):
    (folder / "checkpoints" / "step-00000009.pt").write_bytes(path_of(folder, 4).read_bytes())
    assert checkpoint.load(folder)["step"] == 4


def test_a_broken_index_is_an_error_with_a_way_out_that_works(folder):
    index = folder / "checkpoints" / checkpoint.INDEX
    index.write_text(index.read_text()[:20])
    with pytest.raises(RunError, match="not JSON.*delete the folder checkpoints to start anew"):
        checkpoint.load(folder)


class Code:
    """Its unpickling would run a command."""

    def __reduce__(self):
        return os.system, ("touch executed",)


def test_loading_runs_no_code(folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.save({"step": 5, "weights": Code()}, path_of(folder, 4))
    index = folder / "checkpoints" / checkpoint.INDEX
    entries = json.loads(index.read_text())
    entries["files"][path_of(folder, 4).name] = checkpoint._sha256(path_of(folder, 4))  # its checksum is right
    index.write_text(json.dumps(entries))
    with pytest.raises(pickle.UnpicklingError):
        checkpoint.load(folder)
    assert not (tmp_path / "executed").exists()


@pytest.mark.parametrize(
    ("budget_in_files", "kept"), [(3.5, ["best", "latest", "previous"]), (2.5, ["best", "latest"]), (0.5, ["latest"])]
)
def test_budget_drops_the_previous_then_the_best_and_never_the_latest(tmp_path, budget_in_files, kept):
    state = {"step": 0, "weights": torch.zeros(10_000)}
    size = checkpoint.save(tmp_path, state, best=True).stat().st_size
    for step in (1, 2):
        checkpoint.save(tmp_path, {**state, "step": step}, False, budget_gb=budget_in_files * size / 1e9)
    index = json.loads((tmp_path / "checkpoints" / "index.json").read_text())
    assert sorted(role for role in ("latest", "previous", "best") if index[role]) == kept
    files = {path.name for path in (tmp_path / "checkpoints").glob("*.pt")}
    assert files == {index[role] for role in kept}
    assert checkpoint.load(tmp_path)["step"] == 2
