"""A run that was stopped and continued is the run that was never stopped; what is damaged is not trusted."""

import errno
import io
import json
import os
import pickle
import shutil
import signal
import sys
import threading

import numpy as np
import pytest
import torch
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata
from waiting import LONGEST_S, until

from upsnb import overlays
from upsnb.errors import ConfigError, RunError
from upsnb.runs import checkpoint_index, handle, runfolder
from upsnb.training import checkpoint, checkpoint_shards
from upsnb.training.parallel import Ranks

EVERYTHING = {  # all that draws at random or remembers
    "operator.pdet.drop_path": 0.3,
    "training.noise": 0.1,
    "training.ema_decay": 0.9,
    "training.query_sampling.num_queries": 24,
    "training.lambda_inv_enc": 0.1,
    "training.inverse_loss_frequency": 2,
    "data.datasets.advection.augment": True,
    "data.datasets.darcy.augment": True,
    "data.mixing.by": "loss",
    "stages.operator.epochs": 2,
    "stages.operator.scheduler.name": "plateau",
    "stages.operator.scheduler.plateau_patience": 1,
    "checkpoint.interval": 10,
    "training.batch_size": 16,
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


@pytest.fixture
def whole(cache, tiny_config, train_here, tmp_path_factory):
    """The folder of a run that was never stopped; residency of data and how checkpoints are saved change no number."""
    if not cache:
        cache["folder"] = tmp_path_factory.mktemp("whole")
        train_here(tiny_config(**EVERYTHING), cache["folder"])
    return cache["folder"]


@pytest.mark.parametrize(
    ("residency", "ending", "asynchronous", "at"),
    [  # in the first epoch, which is mixed uniformly, or in the second, which follows the first one's validation
        ("device", "stopped", False, 33),
        ("workers", "killed", False, 13),
        ("device", "killed", True, 33),
        ("workers", "stopped", True, 13),
    ],
)
def test_a_continued_run_is_the_run_that_was_never_stopped(
    tiny_config, train_here, whole, tmp_path, residency, ending, asynchronous, at
):
    config = tiny_config(**EVERYTHING, **{"data.residency": residency, "checkpoint.async_save": asynchronous})
    folder = tmp_path / "parts"

    def interrupt(step):
        if step == at and ending == "stopped":
            runfolder.write_control(folder, None, runfolder.STOP)
        if step == at and ending == "killed":
            raise Killed

    try:
        train_here(config, folder, interrupt)
    except Killed:
        until(lambda: checkpoint_index.is_there(folder, at - 3))  # the thread that writes it lives on in this process
    kept = checkpoint.load(folder)["step"]
    assert kept == (at + 1 if ending == "stopped" else at - 3)  # in the middle of an epoch either way
    (folder / runfolder.CONTROL).unlink(missing_ok=True)
    events = train_here(overlays.apply(config, {"checkpoint.resume": True}), folder)
    expected = losses(runfolder.read_events(whole))
    assert losses(events) == expected and len(expected) == 40
    states = [checkpoint.load(path)["setup"] for path in (whole, folder)]
    expect_same_state(*states)
    evals = [
        [(event["step"], event["val_nrmse"]) for event in runfolder.read_events(path, ("eval",))]
        for path in (whole, folder)
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
    config = tiny_config()
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
    old.step(batches, 0)
    new = tiny_setup(**{"optimizer.lr": 5e-4, "optimizer.weight_decay": 0.01, "optimizer.betas": [0.8, 0.9]})
    new.load_state_dict(old.state_dict())
    for optimizer, before in zip(new.optimizers, old.optimizers):
        for group in optimizer.param_groups:
            assert group["peak_lr"] == 5e-4 and group["weight_decay"] in (0.01, 0.0)
            assert group.get("betas", (0.8, 0.9)) == (0.8, 0.9)
        expect_same_state(optimizer.state_dict()["state"], before.state_dict()["state"])


def test_a_scaled_learning_rate_follows_flips_of_the_batch_and_a_resume(tiny_config, train_here, tmp_path):
    def at_step(step):
        if (step, runfolder.read_control(tmp_path).revision) in ((2, 0), (4, 1)):
            runfolder.write_control(tmp_path, {"training.accum_steps": 4}, runfolder.STOP if step == 4 else None)

    scaled = {"optimizer": {"lr": 1e-3, "lr_scaling": "linear", "lr_reference_batch": 2}}
    steady = {"stages.operator": {"epochs": 4, "scheduler": {"name": "constant", "warmup_fraction": 0.0}}}
    config = tiny_config(("darcy",), **scaled, **steady, **{"training.batch_size": 2})
    train_here(config, tmp_path, at_step)
    (tmp_path / runfolder.CONTROL).unlink()
    again = overlays.apply(config, {"checkpoint.resume": True, "training.accum_steps": 8})
    rates = [event["learning_rate"] for event in train_here(again, tmp_path) if event["kind"] == "step"]
    assert rates[:6] == pytest.approx([1e-3] * 3 + [4e-3] * 2 + [8e-3])


def test_averaging_that_starts_late_starts_from_the_loaded_weights(tiny_setup):
    old = tiny_setup()
    for value in old.model.parameters():
        value.data += 1.0
    new = tiny_setup(**{"training.ema_decay": 0.9})
    new.load_state_dict(old.state_dict())
    assert all(torch.equal(average, p) for average, p in zip(new.ema.average, new.model.parameters()))


# -- files -------------------------------------------------------------------------------------------------------------


class Events(list):
    """Stands for a run's events."""

    def write(self, kind, step, **fields):
        self.append({"kind": kind, "step": step, **fields})


@pytest.fixture
def make_saver(tmp_path):
    """`make_saver()`: a writer of checkpoints into the test's folder, as a newly started process has it."""
    made = []

    def make(folder=tmp_path):
        made.append(checkpoint.Saver(folder, Ranks(), Events()))
        return made[-1]

    yield make
    for saver in made:
        saver.close()


def state(step, value=None, size=64):
    return {"step": step, "weights": torch.full((size,), float(step if value is None else value))}


@pytest.fixture(scope="module")
def trained(tiny_config, train_here, tmp_path_factory):
    """The folder of a tiny run that trained to its end; to be copied."""
    folder = tmp_path_factory.mktemp("trained")
    train_here(tiny_config(("darcy",), **{"training.ema_decay": 0.9}), folder)
    return folder


@pytest.fixture
def folder(tmp_path, make_saver):
    """A run folder with checkpoints of steps 1 (the best), 2, 3 and 4."""
    saver = make_saver()
    for step in range(1, 5):
        saver.save(state(step), ("best",) if step == 1 else ())
    return tmp_path


def names(folder):
    return sorted(path.name for path in (folder / "checkpoints").iterdir() if path.name != checkpoint_index.INDEX)


def path_of(folder, step):
    return folder / "checkpoints" / f"step-{step:08d}"


def index_of(folder):
    return json.loads((folder / "checkpoints" / checkpoint_index.INDEX).read_text())


def test_latest_previous_and_best_are_kept_and_others_dropped(folder, make_saver):
    assert names(folder) == [path_of(folder, step).name for step in (1, 3, 4)]
    assert checkpoint.load(folder)["step"] == 4 and checkpoint.load(folder, "best")["step"] == 1
    make_saver().save(state(5), ("best",))
    assert names(folder) == [path_of(folder, step).name for step in (4, 5)]


def test_the_end_of_the_last_whole_epoch_is_kept(folder, make_saver):
    saver = make_saver()
    for step in (5, 6, 7):
        saver.save(state(step), ("epoch",) if step == 5 else ())
    assert names(folder) == [path_of(folder, step).name for step in (1, 5, 6, 7)]
    saver.save(state(8), ("epoch",))
    assert index_of(folder)["epoch"] == "step-00000008" and not path_of(folder, 5).exists()


def test_a_checkpoint_is_shards_their_contents_and_plain_text(folder):
    assert sorted(path.name for path in path_of(folder, 4).iterdir()) == [".metadata", "__0_0.distcp", "state.json"]
    assert json.loads((path_of(folder, 4) / "state.json").read_text()) == {"step": 4}
    listed = index_of(folder)["checkpoints"]["step-00000004"]["files"]
    assert listed.keys() == {".metadata", "__0_0.distcp", "state.json"}
    assert str(folder).encode() not in (path_of(folder, 4) / ".metadata").read_bytes()


def test_any_nest_of_tensors_and_plain_data_comes_back(tmp_path, make_saver):
    given = {
        "step": 1,
        "a/b%": {"x.y": torch.arange(6.0).reshape(2, 3)[:, 1:], "none": None, "numbers": [1, 0.1, float("inf")]},
        "empty": {},
        "half": torch.ones(3, dtype=torch.bfloat16),
        "scalar": torch.tensor(5),
        "bytes": torch.get_rng_state(),
    }
    make_saver().save(given)
    expect_same_state({**given, "name": "step-00000001", "passed_over": []}, checkpoint.load(tmp_path))


def test_a_folder_without_checkpoints_has_none(tmp_path):
    assert checkpoint.load(tmp_path) is None and checkpoint.load(tmp_path, "best") is None


def test_saving_a_step_twice_keeps_the_one_before_it(folder, make_saver):
    make_saver().save(state(4, 0.0))
    found = checkpoint.load(folder)
    assert found["weights"].unique().tolist() == [0.0] and found["name"] == "step-00000004-2"
    assert names(folder) == ["step-00000001", "step-00000003", "step-00000004-2"]
    (folder / "checkpoints" / found["name"] / "state.json").unlink()
    assert checkpoint.load(folder)["step"] == 3


def damage(path, how):
    shard, metadata = path / "__0_0.distcp", path / ".metadata"
    data = shard.read_bytes()
    if how == "truncated":
        shard.write_bytes(data[: len(data) // 2])
    elif how == "emptied":
        shard.write_bytes(b"")
    elif how == "missing":
        shard.unlink()
    elif how == "contents damaged":
        metadata.write_bytes(metadata.read_bytes().replace(b"weights", b"weighty"))
    else:  # one bit of a weight
        middle = data.rindex(np.full(64, float(path.name[-1]), dtype=np.float32).tobytes()) + 10
        shard.write_bytes(data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :])


@pytest.mark.parametrize("how", ("truncated", "emptied", "missing", "contents damaged", "bit flipped"))
def test_a_damaged_latest_falls_back_to_the_one_before(folder, how):
    damage(path_of(folder, 4), how)
    found = checkpoint.load(folder)
    assert found["step"] == 3 and found["weights"].unique().tolist() == [3.0]
    assert [text.split("/")[0] for text in found["passed_over"]] == ["step-00000004"]
    damage(path_of(folder, 3), how)
    assert checkpoint.load(folder)["step"] == 1


def test_a_damaged_latest_does_not_push_out_the_one_that_training_came_from(folder, make_saver):
    damage(path_of(folder, 4), "bit flipped")
    saver = make_saver()
    saver.last = checkpoint.load(folder)["name"]
    saver.save(state(5))
    assert names(folder) == [path_of(folder, step).name for step in (1, 3, 5)]


def test_when_all_are_damaged_the_error_names_them(folder):
    for step in (1, 3, 4):
        damage(path_of(folder, step), "bit flipped")
    with pytest.raises(RunError, match="00004/__0_0.distcp does not match.*step-00000003.*step-00000001"):
        checkpoint.load(folder)


def test_a_damaged_best_is_not_replaced_by_another(folder):
    damage(path_of(folder, 1), "bit flipped")
    with pytest.raises(RunError, match="step-00000001"):
        checkpoint.load(folder, "best")


@pytest.mark.parametrize("asynchronous", (False, True))
def test_a_full_disk_leaves_the_old_state_and_frees_what_it_took(folder, make_saver, monkeypatch, asynchronous):
    def full(self, plan, planner):
        (self.path / "__0_0.distcp").write_bytes(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    saver = make_saver()
    monkeypatch.setattr(checkpoint_shards._Writer, "write_data", full)
    with pytest.raises(OSError, match="No space") as caught:
        saver.save(state(5), ("best",), asynchronous)
        saver.wait()
    assert caught.value.errno == errno.ENOSPC
    assert checkpoint.load(folder)["step"] == 4 and checkpoint.load(folder, "best")["step"] == 1
    assert names(folder) == [path_of(folder, step).name for step in (1, 3, 4)]


CHANGES = ("os.rename", "os.remove", "os.mkdir", "os.rmdir")


def save_and_die(saver, at, asynchronous):
    """Save step 5 in a forked process that is killed before its `at`-th change to the disk; whether it was."""
    child = os.fork()
    if child == 0:
        changes = 0

        def audit(event, arguments):
            nonlocal changes
            if event in CHANGES or (event == "open" and str(arguments[1])[:1] in "wa" and "step-" in str(arguments[0])):
                changes += 1
                if changes == at:
                    os.kill(os.getpid(), signal.SIGKILL)

        try:
            saver.thread = checkpoint.ThreadPoolExecutor(1)
            sys.addaudithook(audit)
            saver.save(state(5), (), asynchronous)
            saver.wait()
        finally:
            os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL


@pytest.mark.skipif(not hasattr(os, "fork"), reason="kills a forked process")
@pytest.mark.parametrize("asynchronous", (False, True))
def test_a_process_killed_before_any_change_to_the_disk_leaves_whole_checkpoints(folder, make_saver, asynchronous):
    at, seen = 1, []
    while save_and_die(make_saver(), at, asynchronous):
        seen.append(checkpoint.load(folder)["step"])
        assert checkpoint.load(folder)["passed_over"] == [] and checkpoint.load(folder, "best")["step"] == 1
        make_saver()  # as the relaunched process does
        assert not [name for name in names(folder) if name.startswith(".")]
        assert set(names(folder)) == {name for role in checkpoint_index.ROLES if (name := index_of(folder)[role])}
        at += 1
    assert len(seen) > 8 and set(seen) == {4, 5} and seen == sorted(seen)


def test_a_lost_index_is_an_error_and_nothing_is_deleted(folder, make_saver):
    (folder / "checkpoints" / checkpoint_index.INDEX).unlink()
    for attempt in (lambda: checkpoint.load(folder), make_saver):
        with pytest.raises(RunError, match="no index.json.*put it back, or delete the folder checkpoints"):
            attempt()
    assert len(names(folder)) == 3


def test_a_broken_index_is_an_error_with_a_way_out_that_works(folder):
    index = folder / "checkpoints" / checkpoint_index.INDEX
    index.write_text(index.read_text()[:20])
    with pytest.raises(RunError, match="not JSON.*delete the folder checkpoints to start anew"):
        checkpoint.load(folder)


def test_checkpoints_of_the_first_format_are_refused_with_a_way_out(folder):
    (folder / "checkpoints" / "step-00000009.pt").write_bytes(b"one file")
    with pytest.raises(RunError, match="format 1.*start in a new folder, or delete"):
        checkpoint.load(folder)


@pytest.mark.parametrize(
    ("budget", "kept"),
    [
        (4.5, ["best", "epoch", "latest", "previous"]),
        (3.5, ["best", "epoch", "latest"]),
        (2.5, ["best", "latest"]),
        (0.5, ["latest"]),
    ],
)
def test_budget_drops_the_previous_then_the_epoch_then_the_best_and_never_the_latest(
    tmp_path, make_saver, budget, kept
):
    saver = make_saver()
    saver.save(state(0, size=10_000), ("best",))
    size = checkpoint_index.num_bytes(index_of(tmp_path)["checkpoints"]["step-00000000"]["files"])
    for step, roles in ((1, ("epoch",)), (2, ()), (3, ())):
        saver.save(state(step, size=10_000), roles, budget_gb=budget * size / 1e9)
    index = index_of(tmp_path)
    assert sorted(role for role in checkpoint_index.ROLES if index[role]) == kept
    assert names(tmp_path) == sorted({index[role] for role in kept})
    assert checkpoint.load(tmp_path)["step"] == 3


def test_epochs_are_saved_at_their_end_once_per_interval(tiny_config, train_here, tmp_path):
    settings = {"stages.operator.epochs": 6, "evaluation.every_epochs": 6, "checkpoint.interval": 3}
    events = train_here(tiny_config(("darcy",), **settings), tmp_path)
    saved = [event for event in events if event["kind"] == "checkpoint"]
    assert [event["step"] for event in saved if event["epoch_end"]] == [
        4,
        8,
        12,
        12,
    ]  # of two steps each; best and last
    assert sorted({event["step"] for event in saved}) == [3, 4, 6, 8, 9, 12]


# -- in the background -------------------------------------------------------------------------------------------------


@pytest.fixture
def gate(monkeypatch):
    """Shards are written once this is set."""
    gate, write = threading.Event(), checkpoint_shards._Writer.write_data

    def waits(self, plan, planner):
        gate.wait(LONGEST_S)
        return write(self, plan, planner)

    monkeypatch.setattr(checkpoint_shards._Writer, "write_data", waits)
    yield gate
    gate.set()


def test_an_asynchronous_save_returns_before_it_is_written_and_keeps_the_values_of_the_call(folder, make_saver, gate):
    saver, given = make_saver(), state(5)
    saver.save(given, ("best",), asynchronous=True)
    given["weights"].zero_()
    assert not saver.events and checkpoint.load(folder)["step"] == 4 and index_of(folder)["best"] == "step-00000001"
    saver.poll()
    gate.set()
    saver.wait()
    assert checkpoint.load(folder, "best")["weights"].unique().tolist() == [5.0]
    (event,) = saver.events
    assert event["asynchronous"] and event["best"] and 0 < event["stall_s"] < event["save_s"] and event["size_mib"] > 0


def test_a_second_save_waits_for_the_first(folder, make_saver, gate):
    saver = make_saver()
    saver.save(state(5), asynchronous=True)
    threading.Timer(0.3, gate.set).start()
    saver.save(state(6), asynchronous=True)
    assert [event["step"] for event in saver.events][:1] == [5] and gate.is_set()
    saver.save(state(7))
    assert [event["step"] for event in saver.events] == [5, 6, 7] and checkpoint.load(folder)["step"] == 7


def test_host_memory_of_one_save_does_not_leak_into_the_next(tmp_path, make_saver):
    saver, given = make_saver(), state(1)
    for step in (1, 2, 3):  # the same tensors: their copies are kept and filled anew
        given["step"] = step
        given["weights"].fill_(step)
        saver.save(given, asynchronous=True)
        given["weights"].fill_(-1)
        saver.wait()
        assert checkpoint.load(tmp_path)["weights"].unique().tolist() == [step]


def test_an_error_in_the_background_ends_training_at_the_next_step(tiny_config, train_here, tmp_path, monkeypatch):
    def full(self, plan, planner):
        raise OSError(errno.ENOSPC, "No space left on device")

    def wait_after_ten(step):
        for saver in savers if step >= 10 else ():  # for the thread, so that the test need not race it
            until(lambda saver=saver: saver.in_flight is None or saver.in_flight.done())

    savers, prepare = [], checkpoint.Saver.__init__
    monkeypatch.setattr(
        checkpoint.Saver, "__init__", lambda self, *given: (savers.append(self), prepare(self, *given))[1]
    )
    monkeypatch.setattr(checkpoint_shards._Writer, "write_data", full)
    config = tiny_config(**{"checkpoint.interval": 10, "checkpoint.async_save": True, "stages.operator.epochs": 2})
    with pytest.raises(OSError, match="No space"):
        train_here(config, tmp_path, wait_after_ten)
    assert losses(runfolder.read_events(tmp_path)).keys() <= set(range(1, 12))
    assert names(tmp_path) == []


@pytest.mark.parametrize("writes", (True, False))
def test_a_long_save_beats_while_it_writes_and_not_while_it_hangs(folder, make_saver, monkeypatch, writes):
    looks, beats, watched = [], [], checkpoint._bytes_below

    def slow(self, plan, planner):
        with open(self.path / "__0_0.distcp", "wb", buffering=0) as file:
            for number in range(20):  # each time the watcher has looked once more
                until(lambda number=number: len(looks) > number)
                file.write(b"x" * writes)
        raise OSError("done")

    saver = make_saver()
    saver.beat = lambda: beats.append(len(looks))
    monkeypatch.setattr(checkpoint, "WATCH_INTERVAL_S", 0.005)
    monkeypatch.setattr(checkpoint, "_bytes_below", lambda folder: (looks.append(folder), watched(folder))[1])
    monkeypatch.setattr(checkpoint_shards._Writer, "write_data", slow)
    with pytest.raises(OSError, match="done"):
        saver.save(state(5))
    assert len(beats) > 5 if writes else len(beats) <= 3


# -- code in files -----------------------------------------------------------------------------------------------------


class Code:
    """Its unpickling would run a command."""

    def __reduce__(self):
        return os.system, ("touch executed",)


def replace(folder, file, data):
    """Exchange a file of the latest checkpoint, with a checksum that is right."""
    path = path_of(folder, 4) / file
    path.write_bytes(data)
    index = index_of(folder)
    index["checkpoints"]["step-00000004"]["files"][file] = checkpoint_index.digest(path)
    (folder / "checkpoints" / checkpoint_index.INDEX).write_text(json.dumps(index))


def torch_bytes(value):
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def contents(folder, change):
    """The latest checkpoint's table of contents after `change`, as bytes."""
    metadata = pickle.loads((path_of(folder, 4) / ".metadata").read_bytes())
    change(metadata)
    return pickle.dumps(metadata)


def as_bytes_entry(metadata):
    metadata.state_dict_metadata["weights"] = BytesStorageMetadata()


def with_code(metadata):
    metadata.planner_data = Code()


def elsewhere(metadata):
    for info in metadata.storage_data.values():
        info.relative_path = "../../secret"


def of_length(length):
    def change(metadata):
        for info in metadata.storage_data.values():
            info.offset, info.length = 0, length

    return change


def of_size(metadata):
    for entry in metadata.state_dict_metadata.values():
        entry.size = torch.Size([10**12])


@pytest.mark.parametrize("change", (as_bytes_entry, with_code, elsewhere, of_size))
def test_malicious_contents_are_refused_by_name_and_run_no_code(folder, monkeypatch, change):
    monkeypatch.chdir(folder)
    (folder / "secret").write_bytes(torch_bytes(torch.zeros(64)))
    replace(folder, "__0_0.distcp", torch_bytes(Code()))
    replace(folder, ".metadata", contents(folder, change))
    with pytest.raises(RunError, match=r"step-00000004/\.metadata: not a table of contents"):
        checkpoint.load(folder)
    assert not (folder / "executed").exists()


@pytest.mark.parametrize("data", (pickle.dumps(Code()), b"", b"\x80\x04.", pickle.dumps({"weights": 1})))
def test_what_is_no_table_of_contents_is_refused_by_name(folder, monkeypatch, data):
    monkeypatch.chdir(folder)
    replace(folder, ".metadata", data)
    with pytest.raises(RunError, match=r"step-00000004/\.metadata: not a table of contents"):
        checkpoint.load(folder)
    assert not (folder / "executed").exists()


@pytest.mark.parametrize(
    "data", (torch_bytes(Code()), torch_bytes({"weights": Code()}), pickle.dumps(Code()) + bytes(999))
)
def test_a_malicious_shard_is_refused_by_name_and_runs_no_code(folder, monkeypatch, data):
    monkeypatch.chdir(folder)
    replace(folder, "__0_0.distcp", data)
    replace(folder, ".metadata", contents(folder, of_length(len(data))))
    with pytest.raises(RunError, match="step-00000004/__0_0.distcp: not a shard of tensors"):
        checkpoint.load(folder)
    assert not (folder / "executed").exists()


def test_contents_that_change_the_classes_they_are_made_of_are_refused(folder):
    module, name = Metadata.__module__, Metadata.__name__
    code = (
        f"c{module}\n{name}\n(N}}X\x05\x00\x00\x00stuckK\x01stb.".encode()
    )  # setattr(Metadata, "stuck", 1), says pickle's own
    replace(folder, ".metadata", b"\x80\x02" + code)
    with pytest.raises(RunError, match="it changes Metadata itself"):
        checkpoint.load(folder)
    assert not hasattr(Metadata, "stuck")


@pytest.mark.parametrize("text", ["", "[1]", "{", "[" * 10**5, '{"a": {"$float": "x"}}', "\xff"])
def test_plain_data_that_are_none_are_refused_in_one_sentence(folder, text):
    replace(folder, "state.json", text.encode("latin-1"))
    index = index_of(folder)
    for role in checkpoint_index.ROLES:
        index[role] = "step-00000004"
    (folder / "checkpoints" / checkpoint_index.INDEX).write_text(json.dumps(index))
    with pytest.raises(RunError, match=r"step-00000004/state.json: .* -> start the run anew"):
        checkpoint.load(folder)


@pytest.mark.parametrize(
    "config", ["", "[1", "format: 9", "format: 1\nlatent: {dimm: 3}", "format: 1\ntraining: {batch_size: x}"]
)
def test_a_checkpoint_whose_config_is_broken_is_passed_over_for_the_one_before(folder, config):
    state = json.loads((path_of(folder, 4) / "state.json").read_text())
    replace(folder, "state.json", json.dumps({**state, "config": config}).encode())
    found = checkpoint.load(folder)
    assert found["name"] != "step-00000004" and found["step"] < 4
    (damage,) = found["passed_over"]
    assert damage.startswith("step-00000004/1 problem in the config in state.json ") and "\n" not in damage


@pytest.mark.parametrize(
    "change",
    [
        lambda index: index.pop("checkpoints"),
        lambda index: index.update(latest="step-00000009"),
        lambda index: index.update(latest=["step-00000004"]),
        lambda index: index["checkpoints"].update({"../../x": index["checkpoints"]["step-00000004"]}),
        lambda index: index["checkpoints"]["step-00000004"].pop("step"),
        lambda index: index["checkpoints"]["step-00000004"]["files"].update({"../../secret": {"bytes": 1}}),
        lambda index: index["checkpoints"]["step-00000004"]["files"].update({"state.json": 3}),
    ],
)
def test_an_index_that_names_what_no_checkpoint_is_is_refused(folder, change):
    index = index_of(folder)
    change(index)
    (folder / "checkpoints" / checkpoint_index.INDEX).write_text(json.dumps(index))
    with pytest.raises(RunError, match="-> start in a new folder"):
        checkpoint.load(folder)
    assert not checkpoint_index.is_there(folder)


@pytest.mark.parametrize(
    "change",
    [
        lambda state: state.pop("setup"),
        lambda state: state.pop("config"),
        lambda state: state.update(config="[1"),
        lambda state: state["specs"]["darcy"].pop("tokens"),
        lambda state: state["specs"]["darcy"].update(grid_shape=[32, 32]),
        lambda state: state["specs"]["darcy"].update(input_mean="x"),
        lambda state: state.update(position=3),
        lambda state: state["position"].update(step="x"),
        lambda state: state["position"].update(unknown=1),
        lambda state: state["setup"].update(plateau={}),
        lambda state: state["setup"].update(ema=3),
    ],
)
def test_a_state_that_was_changed_is_refused_in_one_sentence(tiny_config, train_here, trained, tmp_path, change):
    folder = shutil.copytree(trained, tmp_path / "run")
    (path,) = (folder / "checkpoints").glob("step-*/state.json")
    values = json.loads(path.read_text())
    change(values)
    path.write_text(json.dumps(values))
    index = index_of(folder)
    index["checkpoints"][path.parent.name]["files"]["state.json"] = checkpoint_index.digest(path)
    (folder / "checkpoints" / checkpoint_index.INDEX).write_text(json.dumps(index))
    refused = 0
    for use in (
        lambda: handle.Run(folder).load_model(),
        lambda: train_here(tiny_config(("darcy",), **{"training.ema_decay": 0.9, "checkpoint.resume": True}), folder),
    ):
        try:
            use()
        except (RunError, ConfigError) as error:
            refused += 1
            assert "->" in str(error) or isinstance(error, ConfigError)
    assert refused


# -- models ------------------------------------------------------------------------------------------------------------


def test_the_trained_model_is_read_without_the_optimizer(tiny_config, train_here, tmp_path, monkeypatch):
    config = tiny_config(("darcy",), **{"training.ema_decay": 0.9})
    train_here(config, tmp_path)
    read, allocated = checkpoint_shards.read, []

    def counted(folder, files, allocate, group, alone):
        def count(name, shape, dtype):
            tensor = allocate(name, shape, dtype)
            allocated.append((name, tensor is not None))
            return tensor

        return read(folder, files, count, group, alone)

    monkeypatch.setattr(checkpoint_shards, "read", counted)
    model = handle.Run(tmp_path).load_model()
    average = checkpoint.load(tmp_path)["setup"]["ema"]["average"]
    assert not model.training
    assert all(torch.equal(average[name], value) for name, value in model.named_parameters())
    kinds = {name.split("/")[1]: taken for name, taken in allocated[: len(allocated) // 2]}
    assert kinds == {"model": True, "ema": True, "moments": False, "random": False}


def test_a_run_without_a_checkpoint_has_no_model_yet(tmp_path):
    with pytest.raises(RunError, match="no checkpoint yet"):
        handle.Run(tmp_path).load_model()


@pytest.fixture(scope="module")
def with_roles(tmp_path_factory):
    """A folder whose checkpoints are the latest and the one before; neither is the best."""
    place = tmp_path_factory.mktemp("roles")
    (place / runfolder.CHECKPOINTS).mkdir()
    for step in (1, 2):
        written = checkpoint_index.temporary(place, step)
        written.mkdir()
        (written / "state.json").write_text(str(step))
        checkpoint_index.commit(place, step, {"state.json": checkpoint_index.digest(written / "state.json")})
    return place


@pytest.mark.parametrize(("which", "expected"), [
    ("bset", r"has no checkpoint 'bset' -> did you mean best\? it has latest, previous"),
    ("best", "has no checkpoint 'best' -> it has latest, previous"),
    (2, "has no checkpoint 2 -> "),
    ("", "has no checkpoint '' -> "),
    (None, "has no checkpoint None -> "),
])  # fmt: skip
def test_a_checkpoint_that_is_not_there_is_refused_with_those_that_are(with_roles, which, expected):
    with pytest.raises(RunError, match=expected):
        handle.Run(with_roles).load_model(which)


def test_each_role_is_its_own_checkpoint(with_roles):
    assert [checkpoint_index.choose(with_roles, role).path.name for role in ("latest", "previous")] == [
        "step-00000002", "step-00000001"]  # fmt: skip


@pytest.mark.parametrize("device", ["gpu", "cuda:99", ""])
def test_a_device_that_is_not_here_is_refused_by_name(with_roles, device):
    with pytest.raises(RunError, match=f"device '{device}' cannot be used here"):
        handle.Run(with_roles).load_model("latest", device)


def test_a_run_predicts_with_the_checkpoint_that_is_asked_for(tiny_config, train_here, tmp_path, monkeypatch):
    config = tiny_config(**{"stages.operator.epochs": 2, "checkpoint.interval": 1})
    train_here(config, tmp_path)
    run, loaded = handle.Run(tmp_path), []
    monkeypatch.setattr(run, "load_model", lambda *which: loaded.append(which) or handle.Run.load_model(run, *which))
    x = np.random.default_rng(0).normal(size=(3, 2, 1, 32)).astype(np.float32)
    latest = run.predict(x, "advection")  # beta may be left out: it was trained on one
    with torch.no_grad():
        expected = run.load_model()("advection", torch.from_numpy(x), torch.full((3, 1), 0.4), 2.0 / 12)
    np.testing.assert_allclose(latest, expected.numpy(), rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(run.predict(x[0], "advection", 0.4, num_frames=4)[:2].shape, latest[0].shape)
    assert loaded[1:] == [()] and loaded[0] == ("latest", "cpu"), "loaded once"
    assert not np.allclose(run.predict(x, "advection", which="previous"), latest)
    with pytest.warns(UserWarning, match="beta = 3, and advection was trained on 0.4 -> take the answer for a guess"):
        run.predict(x, "advection", 3.0)
    with pytest.raises(RunError, match="did you mean best"):
        run.predict(x, "advection", which="bset")
