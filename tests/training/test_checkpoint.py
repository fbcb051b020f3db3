"""Checkpoints on disk: what is kept, what is damaged is not trusted, and what a model is loaded from."""

import errno
import json
import os
import signal
import sys
import threading

import numpy as np
import pytest
import torch
from saved import expect_same_state, index_of, losses, names, path_of, state
from waiting import LONGEST_S, until

from upsnb.errors import RunError
from upsnb.runs import checkpoint_index, handle, runfolder
from upsnb.training import checkpoint, checkpoint_shards

# -- files -------------------------------------------------------------------------------------------------------------


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
            for _ in range(20):
                seen = len(looks)
                until(lambda seen=seen: len(looks) > seen)  # a look of the watcher's between two of these
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


def test_a_folder_that_goes_while_it_is_looked_at_ends_no_watch(tmp_path, monkeypatch):
    """A failed save may delete it between two system calls; without beats the run would be taken for one that hangs."""
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner/shard").write_bytes(b"12345")
    assert checkpoint._bytes_below(tmp_path) == 5

    def gone(path):
        raise FileNotFoundError(path)

    monkeypatch.setattr(os, "scandir", gone)
    assert checkpoint._bytes_below(tmp_path) == 0


# -- models ------------------------------------------------------------------------------------------------------------


def test_the_trained_model_is_read_without_the_optimizer(tiny_config, train_here, tmp_path, monkeypatch):
    config = tiny_config(("darcy",), **{"training.ema_decay": 0.9})
    train_here(config, tmp_path)
    read, allocated = checkpoint_shards.read, []

    def counted(folder, files, allocate, group, alone):
        def count(path, shape, dtype):
            tensor = allocate(path, shape, dtype)
            allocated.append((path, tensor is not None))
            return tensor

        return read(folder, files, count, group, alone)

    monkeypatch.setattr(checkpoint_shards, "read", counted)
    model = handle.Run(tmp_path).load_model()
    average = checkpoint.load(tmp_path)["setup"]["ema"]["average"]
    assert not model.training
    assert all(torch.equal(average[name], value) for name, value in model.named_parameters())
    kinds = {path[1]: taken for path, taken in allocated[: len(allocated) // 2]}
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
    assert loaded[1:] == [()] and loaded[0] == ("latest", "cpu", None), "loaded once"
    assert not np.allclose(run.predict(x, "advection", which="previous"), latest)
    with pytest.warns(UserWarning, match="beta = 3, and advection was trained on 0.4 -> take the answer for a guess"):
        run.predict(x, "advection", 3.0)
    with pytest.raises(RunError, match="did you mean best"):
        run.predict(x, "advection", which="bset")
