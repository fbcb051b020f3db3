"""Checkpoints in a second place: whole ones only, whatever happens to either disk, and back on a new machine."""

import errno
import json
import os
import shutil
import stat

import pytest

from upsnb import overlays
from upsnb.errors import RunError
from upsnb.runs import checkpoint_index, mirror, runfolder
from upsnb.runs.mirror import Mirror


def save(folder, step, *roles, size=100_000):
    """One checkpoint of two files, as a run writes it."""
    checkpoint_index.prepare(folder)
    written = checkpoint_index.temporary(folder, step)
    written.mkdir()
    for name in ("__0_0.distcp", "state.json"):
        (written / name).write_bytes(os.urandom(size))
    files = {path.name: checkpoint_index.digest(path) for path in written.iterdir()}
    return checkpoint_index.commit(folder, step, files, roles)


def steps(folder):
    """Steps of the roles; each checkpoint is whole."""
    index = checkpoint_index.read_index(folder)
    named = {role: index["checkpoints"][index[role]]["step"] for role in checkpoint_index.ROLES if index[role]}
    for role, step in named.items():
        assert checkpoint_index.choose(folder, role).passed_over == () and checkpoint_index.is_there(folder, step)
    return named


@pytest.fixture
def config(tmp_path):
    (tmp_path / "drive").mkdir()
    return overlays.resolve({"checkpoint": {"mirror": {"folder": str(tmp_path / "drive")}}})


@pytest.fixture
def folder(config, tmp_path):
    """A run that has saved steps 1 (its best) to 3."""
    folder = runfolder.create(config, tmp_path / "run")
    for step in (1, 2, 3):
        save(folder, step, *("best",) * (step == 1))
    return folder


@pytest.fixture
def drive(tmp_path, folder):
    return tmp_path / "drive" / folder.name


@pytest.fixture
def followed(folder, config):
    return Mirror(folder, config)


def messages(folder):
    return [event["message"] for event in runfolder.read_events(folder, ("warning",))]


def test_without_a_mirror_nothing_is_copied(folder, tmp_path):
    nowhere = Mirror(folder, overlays.resolve({}))
    nowhere.follow(), nowhere.finish()
    assert nowhere.thread is None and not list((tmp_path / "drive").iterdir())
    assert mirror.prepare(overlays.resolve({}), tmp_path / "new") == ""


def test_the_mirror_has_every_role_the_config_and_the_curve_and_follows(folder, drive, followed):
    runfolder.EventWriter(folder).write("start", 0)
    followed.finish()
    assert steps(drive) == {"latest": 3, "previous": 2, "best": 1}
    assert (drive / runfolder.CONFIG).read_bytes() == (folder / runfolder.CONFIG).read_bytes()
    assert (drive / "events.jsonl").read_text() == (folder / "events.jsonl").read_text()
    copied = sorted(drive.rglob("*"), key=str)
    followed.follow()
    assert not followed.thread.is_alive() and sorted(drive.rglob("*"), key=str) == copied, "nothing new, nothing done"
    save(folder, 4, "best")
    followed.finish()
    assert steps(drive) == {"latest": 4, "previous": 3, "best": 4}
    assert runfolder.read_manifest(folder)["mirror"] == {"folder": str(drive), "step": 4, "trouble": None}


def test_a_checkpoint_that_was_mirrored_as_the_latest_is_the_best_there_too(folder, drive, followed):
    followed.finish()
    index = checkpoint_index.read_index(folder)
    runfolder.write_json(checkpoint_index.home(folder) / checkpoint_index.INDEX, index | {"best": index["latest"]})
    followed.finish()
    assert steps(drive)["best"] == steps(drive)["latest"] == 3


def test_a_budget_keeps_the_latest_and_one_that_is_too_small_is_said(folder, drive, config):
    small = overlays.apply(config, {"checkpoint.mirror.budget_gb": 3e-4})  # one and a half checkpoints
    Mirror(folder, small).finish()
    assert steps(drive) == {"latest": 3} and len(list((drive / "checkpoints").glob("step-*"))) == 1
    shutil.rmtree(drive)
    Mirror(folder, overlays.apply(config, {"checkpoint.mirror.budget_gb": 1e-4})).finish()
    assert steps(drive) == {} and "takes 0.0002 GB, the budget there is 0.0001 -> raise" in messages(folder)[0]


def test_a_drive_that_is_gone_is_one_warning_and_is_caught_up_with(folder, drive, followed):
    drive.parent.rename(drive.parent.with_name("away"))
    followed.finish(), followed.finish()
    assert not drive.parent.exists(), "what is written there would be lost with the machine"
    (message,) = messages(folder)
    assert message == f"checkpoints are not mirrored now, and training goes on: {drive.parent} is gone"
    drive.parent.mkdir()
    followed.finish()
    assert steps(drive)["latest"] == 3 and runfolder.read_manifest(folder)["mirror"]["trouble"] is None


@pytest.mark.parametrize("number", range(1, 8))
def test_a_full_drive_keeps_what_it_has_and_leaves_nothing_half_written(folder, drive, followed, monkeypatch, number):
    followed.finish()
    for step in (4, 5):
        save(folder, step)
    left, sync = [number], os.fsync

    def full(descriptor):
        left[0] -= 1
        if left[0] == 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", full)
    followed._copy(0)
    monkeypatch.setattr(os, "fsync", sync)
    assert {"latest", "best"} <= steps(drive).keys() and "No space left" in messages(folder)[0]
    followed.retry = 0.0
    followed.finish()
    assert steps(drive)["latest"] == 5 and not list((drive / "checkpoints").glob(".step-*"))


def test_a_drive_that_cannot_sync_folders_is_as_good(folder, drive, followed, monkeypatch):
    sync = os.fsync

    def files_only(descriptor):
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "Invalid argument")
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", files_only)
    followed.finish()
    assert steps(drive)["latest"] == 3 and not messages(folder)


def test_what_a_killed_copy_left_is_no_checkpoint(folder, drive, followed, monkeypatch):
    followed.finish()
    save(folder, 4)

    def die(*arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(checkpoint_index, "commit", die)
    with pytest.raises(KeyboardInterrupt):
        mirror.copy(folder, drive)
    monkeypatch.undo()
    assert steps(drive)["latest"] == 3 and list((drive / "checkpoints").glob(".step-*"))
    followed.finish()
    assert steps(drive)["latest"] == 4


def test_a_damaged_checkpoint_is_not_mirrored(folder, drive, followed):
    path = save(folder, 4) / "state.json"
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    followed.finish()
    assert steps(drive)["latest"] == 3 and "state.json: does not match its checksum" in messages(folder)[0]
    save(folder, 5)
    followed.retry = 0.0
    followed.finish()
    assert steps(drive)["latest"] == 5 and runfolder.read_manifest(folder)["mirror"]["trouble"] is None


def test_a_checkpoint_that_is_replaced_while_it_is_read_is_no_trouble(folder, drive, followed, monkeypatch):
    copy_file = mirror._copy_file

    def replaced(source, *arguments):
        if source.exists() and "step-00000003" in str(source):
            monkeypatch.setattr(mirror, "_copy_file", copy_file)
            for step in (4, 5):
                save(folder, step)
        copy_file(source, *arguments)

    monkeypatch.setattr(mirror, "_copy_file", replaced)
    shutil.rmtree(drive, ignore_errors=True)
    followed.finish()
    assert steps(drive)["latest"] == 5 and not messages(folder)


def test_a_drive_that_hangs_does_not_hold_up_the_end(folder, followed, monkeypatch):
    import threading

    stuck = threading.Event()
    monkeypatch.setattr(mirror, "SILENT_S", 0.2)
    monkeypatch.setattr(mirror, "copy", lambda *arguments: stuck.wait())
    followed.finish()
    assert "took nothing for 0.2 s" in messages(folder)[0]
    stuck.set()


# -- on a new machine ----------------------------------------------------------------------------------------------


def test_a_new_machine_goes_on_from_the_mirror(folder, drive, followed, config):
    runfolder.EventWriter(folder).write("start", 0)
    followed.finish()
    expected, curve = steps(folder), (folder / "events.jsonl").read_text()
    shutil.rmtree(folder)
    resuming = overlays.apply(config, {"checkpoint.resume": True})
    assert mirror.prepare(resuming, folder) == f"goes on from step 3, brought back from {drive}"
    assert steps(folder).items() >= {role: expected[role] for role in ("latest", "best")}.items()
    assert (folder / "events.jsonl").read_text() == curve
    assert mirror.prepare(resuming, folder) == "", "this machine has its own"


def test_of_a_damaged_mirror_the_checkpoint_before_is_taken(folder, drive, followed, config):
    followed.finish()
    (path,) = drive.rglob("step-00000003/state.json")
    path.write_bytes(b"?" * path.stat().st_size)
    shutil.rmtree(folder)
    assert "from step 2" in mirror.prepare(overlays.apply(config, {"checkpoint.resume": True}), folder)


def test_a_new_run_does_not_take_the_place_of_a_mirrored_one(folder, followed, config):
    followed.finish()
    shutil.rmtree(folder)
    with pytest.raises(RunError, match=r"mirrors a run of this name -> set checkpoint\.resume: true to go on"):
        mirror.prepare(config, folder)


def test_a_drive_that_is_not_mounted_is_refused_before_anything_starts(config, tmp_path):
    (tmp_path / "drive").rmdir()
    with pytest.raises(RunError, match=r"drive is no folder -> mount the drive, or make the folder"):
        mirror.prepare(config, tmp_path / "run")
    with pytest.raises(RunError, match="is no folder"):
        mirror.prepare(config, None)
    assert json.dumps(list(map(str, tmp_path.iterdir()))) == "[]"
