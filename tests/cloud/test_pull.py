"""A run's folder comes from a machine whose files change meanwhile, whose line breaks, and that may lie."""

import io
import json
import tarfile
from hashlib import sha256
from pathlib import Path

import pytest

from upsnb.cloud import there as other_end
from upsnb.cloud.host import CHECKPOINTS, KEPT, Host
from upsnb.errors import RunError
from upsnb.overlays import project_root


@pytest.fixture
def run(near, tmp_path):
    """The folder of a run there, with a file of each kind."""
    code = Path(near.folder) / "waves/upsnb/cloud"
    code.mkdir(parents=True)
    (code / "there.py").write_text((project_root() / "upsnb/cloud/there.py").read_text())
    folder = Path(near.folder) / "waves/outputs/waves"
    for name, text in {
        "manifest.json": "{}",
        "events.jsonl": "first\n",
        CHECKPOINTS: '{"latest": "step-1"}',
        "checkpoints/step-1/weights.pt": "w" * 3_000_000,
        "checkpoints/step-1/.metadata": "shards",
        "checkpoints/.step-2/weights.pt": "half of it",
        ".lock": "",
        ".manifest.json.17.42": "half of it",
    }.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


def held(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_what_is_whole_comes_and_only_what_has_changed_comes_again(near, run, tmp_path):
    here = tmp_path / "waves"
    here.mkdir()
    assert near.pull("waves", here) == sum(map(len, held(here).values()))
    hidden = {"checkpoints/.step-2/weights.pt", ".lock", ".manifest.json.17.42"}
    assert held(here) == {name: content for name, content in held(run).items() if name not in hidden}
    assert near.pull("waves", here) == 0
    with open(run / "events.jsonl", "a") as file:
        file.write("second\n")
    assert near.pull("waves", here) == len("first\nsecond\n")
    assert (here / "events.jsonl").stat().st_mtime == pytest.approx((run / "events.jsonl").stat().st_mtime, abs=0.01)


def test_a_checkpoint_that_was_deleted_there_is_deleted_here_and_nothing_else(near, run, tmp_path):
    here = tmp_path / "waves"
    here.mkdir()
    near.pull("waves", here)
    (here / KEPT).write_text("where it trains")
    (here / "notes.json").write_text("mine")
    (run / "checkpoints/step-1/weights.pt").unlink()
    (run / "events.jsonl").unlink()
    near.pull("waves", here)
    assert not (here / "checkpoints/step-1/weights.pt").exists()
    assert {KEPT, "notes.json", "events.jsonl"} <= held(here).keys()


def test_checkpoints_that_come_are_those_their_index_names_though_it_trains_on_meanwhile(
    near, run, tmp_path, monkeypatch
):
    """Between the list and the files, the run saves again and deletes what was listed; once, then it is slower."""
    here, receive, turns = tmp_path / "waves", Host._receive, []
    here.mkdir()

    def saving(self, *arguments):
        if len(turns) < 2:
            turns.append(1)
            step = run / f"checkpoints/step-{len(turns) + 1}"
            step.mkdir()
            (step / "weights.pt").write_text(f"weights {len(turns)}")
            for path in (run / f"checkpoints/step-{len(turns)}").iterdir():
                path.unlink()
            (run / CHECKPOINTS).write_text(json.dumps({"latest": step.name}))
        return receive(self, *arguments)

    monkeypatch.setattr(Host, "_receive", saving)
    near.pull("waves", here)
    assert json.loads((here / CHECKPOINTS).read_text()) == {"latest": "step-3"}
    assert [path.read_text() for path in here.glob("checkpoints/*/*")] == ["weights 2"]


def test_a_file_that_grows_while_it_is_sent_is_sent_as_long_as_it_was(run):
    class Growing(io.BytesIO):
        def write(self, block):
            with open(run / "events.jsonl", "a") as file:
                file.write("more\n")
            return super().write(block)

    stream = Growing()
    other_end.send(run, ["events.jsonl"], stream)
    stream.seek(0)
    with tarfile.open(fileobj=stream) as tar:
        content = tar.extractfile("events.jsonl").read()
        sums = json.load(tar.extractfile(other_end.SUMS))
    assert content.startswith(b"first\n") and sums == {"events.jsonl": sha256(content).hexdigest()}


def test_a_broken_line_loses_nothing_and_the_next_pull_goes_on(near, run, tmp_path, monkeypatch):
    here, command = tmp_path / "waves", Host.command
    here.mkdir()
    cut = "{ %s; } | head -c 2000000"
    monkeypatch.setattr(
        Host, "command", lambda self, script: command(self, cut % script if " send " in script else script)
    )
    with pytest.raises(RunError, match="connection broke"):
        near.pull("waves", here)
    assert "checkpoints/index.json" not in held(here), "it would name what is not there"
    monkeypatch.setattr(Host, "command", command)
    near.pull("waves", here)
    assert held(here)["checkpoints/step-1/weights.pt"] == b"w" * 3_000_000


def sent(members: dict[str, bytes], sums: dict[str, str]) -> bytes:
    stream = io.BytesIO()
    with tarfile.open(mode="w", fileobj=stream) as tar:
        for name, content in {**members, other_end.SUMS: json.dumps(sums).encode()}.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return stream.getvalue()


@pytest.mark.parametrize(
    "listed, members, said",
    [
        ("../../escape", {}, "do not trust"),
        ("/etc/escape", {}, "do not trust"),
        (KEPT, {}, "do not trust"),
        ("events.jsonl", {"../escape": b"x"}, "nobody asked for"),
        ("events.jsonl", {"manifest.json": b"x"}, "nobody asked for"),
        ("events.jsonl", {"events.jsonl": b"changed on its way"}, "otherwise than sent"),
    ],
)
def test_a_machine_that_lies_writes_nothing_outside_the_runs_folder(tmp_path, monkeypatch, listed, members, said):
    (tmp_path / "tar").write_bytes(sent(members, {"events.jsonl": sha256(b"as it was").hexdigest()}))
    (tmp_path / "list").write_text(json.dumps({listed: {"bytes": 3, "sha256": "0" * 64}}))

    def lying(self, script):
        answer = next((file for word, file in {" list ": "list", " send ": "tar"}.items() if word in script), None)
        return ["cat", str(tmp_path / answer)] if answer else ["true"]

    monkeypatch.setattr(Host, "command", lying)
    here = tmp_path / "deep/down/waves"
    here.mkdir(parents=True)
    (here / KEPT).write_text("mine")
    with pytest.raises(RunError, match=said):
        Host("liar").pull("waves", here)
    assert {name for name in held(here) if not name.startswith(".")} == {KEPT}
    assert (here / KEPT).read_text() == "mine" and not list(tmp_path.rglob("escape"))
