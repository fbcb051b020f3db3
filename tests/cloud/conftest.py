"""Another machine, as far as this one can be one: its own sshd on loopback, or no network at all."""

import getpass
import os
import shutil
import socket
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
from fake_vast import KEY, FakeVast
from waiting import until

from upsnb.cloud import host, launches, vast
from upsnb.cloud.host import Host
from upsnb.memory import predict
from upsnb.overlays import project_root

PREDICTED: dict[tuple, object] = {}
SSHD = shutil.which("sshd", path=f"{os.environ['PATH']}:/usr/sbin")


@pytest.fixture
def kept(tmp_path, monkeypatch) -> Path:
    """Where runs' folders are here, instead of outputs/."""
    folder = tmp_path / "outputs"
    folder.mkdir()
    monkeypatch.setattr(launches, "_outputs", lambda: folder)
    return folder


@pytest.fixture(autouse=True)
def predicted_once(monkeypatch):
    """What a step of the same settings takes is predicted once for all tests here; what predicts it has its own."""
    true = predict.Predictor

    def predictor(config, **settings):
        key = (config.model_dump_json(), *settings.items())
        if key not in PREDICTED:
            PREDICTED[key] = true(config, **settings).at()
        return SimpleNamespace(at=lambda: PREDICTED[key])

    monkeypatch.setattr(predict, "Predictor", predictor)


@pytest.fixture
def near(tmp_path, monkeypatch) -> Host:
    """A host that is this machine, without ssh in between."""
    monkeypatch.setattr(Host, "command", lambda self, script: ["bash", "-ec", script])
    return Host("near", folder=str(tmp_path / "there"))


@pytest.fixture
def box(tmp_path, monkeypatch):
    """A host that answers ssh on loopback, known to `ssh` by the name of box; packages are there already."""
    if SSHD is None:
        pytest.skip("needs sshd: apt install openssh-server")
    place = tmp_path / "sshd"
    place.mkdir(mode=0o700)
    for key in ("host", "user"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", place / key], check=True)
    shutil.copy(place / "user.pub", place / "authorized")
    if os.geteuid() == 0:
        Path("/run/sshd").mkdir(exist_ok=True)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    (place / "sshd_config").write_text(
        f"Port {port}\nListenAddress 127.0.0.1\nHostKey {place}/host\nAuthorizedKeysFile {place}/authorized\n"
        "PasswordAuthentication no\nKbdInteractiveAuthentication no\nUsePAM no\nStrictModes no\nPidFile none\n"
    )
    (place / "config").write_text(
        f"Host box\n HostName 127.0.0.1\n Port {port}\nHost *\n User {getpass.getuser()}\n IdentityFile {place}/user\n"
        f" IdentitiesOnly yes\n UserKnownHostsFile {place}/known\n StrictHostKeyChecking accept-new\n"
    )
    (place / "bin").mkdir()
    (place / "bin/ssh").write_text(f'#!/bin/sh\nexec {shutil.which("ssh")} -F {place}/config "$@"\n')
    (place / "bin/ssh").chmod(0o755)
    monkeypatch.setenv("PATH", f"{place}/bin:{os.environ['PATH']}")
    server = subprocess.Popen([SSHD, "-D", "-e", "-f", place / "sshd_config"], stderr=subprocess.DEVNULL)
    until(lambda: subprocess.run([place / "bin/ssh", "box", "true"], capture_output=True).returncode == 0)
    there = Host("box", folder=str(tmp_path / "there"))
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / host.venv_name()).symlink_to(project_root() / ".venv")
    yield there
    server.terminate()
    server.wait()


@pytest.fixture
def cloud(tmp_path, monkeypatch, kept):
    """A server in place of Vast's; instances keep their files in a folder of the test."""
    if not (project_root() / vast.COMMAND).exists():
        pytest.skip("needs Vast's command: make .vastai/.installed")
    (tmp_path / "home").mkdir()
    server = FakeVast(tmp_path)
    for name, value in {"VAST_URL": server.url, "VAST_API_KEY": KEY, "HOME": str(tmp_path / "home")}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    for name, value in {"PLACE": str(tmp_path / "there"), "EVERY_S": 1, "LOOK_S": 0.2, "AGAIN_S": 2}.items():
        monkeypatch.setattr(vast, name, value)
    monkeypatch.setattr(launches.runfolder, "new_folder", lambda name, root="": _made(kept / name))
    yield server
    server.close()


def _made(folder: Path) -> Path:
    folder.mkdir()
    return folder
