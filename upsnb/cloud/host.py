"""A notebook run on another machine that answers ssh: code and settings go there, the run's folder comes back.

Nothing is asked of that machine but Linux, Python 3.11 to 3.14 and its `venv`. There, each run has a folder of its own
with the code that it was started with, so that a second one does not change what the first one imports; packages are
shared.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import shlex
import subprocess
import tarfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from upsnb.cloud.there import SUMS
from upsnb.errors import RunError
from upsnb.runs import runfolder
from upsnb.runs.checkpoint_index import INDEX
from upsnb.runs.files import replacing, sha256_of

CODE = ("upsnb", "notebooks", "params", "examples", "pyproject.toml", "constraints.txt", "README.md", "LICENSE")
GIVEN, EXIT_CODE, OUTPUT, PROCESS, LIFE = "given.yaml", "exit_code", "output.txt", "process", "life"
CONNECT_S, SILENT_S = 20, 60  # until a machine answers; until one that no longer answers is given up
ANSWER_S = 120.0  # for a request that moves nothing
INSTALL_S = 3600.0
CHECKPOINTS = f"{runfolder.CHECKPOINTS}/{INDEX}"
MOST_TURNS = 6  # of a pull from a run that goes on writing
SSH_FAILED = 255  # ssh's own exit code
KEPT = "cloud.json"  # in a run's folder here: where it trains
KNOWN = "cloud.known_hosts"  # there too: the key of a machine that was rented for it
PYTHON = """for p in python3 python3.14 python3.13 python3.12 python3.11 none; do
    command -v $p >/dev/null && $p -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 15))' && break
done
[ $p != none ] || { echo "no Python 3.11 to 3.14 -> install one there" >&2; exit 3; }
"""


@dataclass(frozen=True)
class Host:
    """A machine as ssh knows it; keys, jump hosts and the rest are in the user's ~/.ssh/config."""

    address: str  # an alias, a name, or user@name
    port: int | None = None
    folder: str = "upsnb-runs"  # from the user's home there
    known: str | None = None  # file for the key of one that is new: addresses of rented machines come again

    def command(self, script: str) -> list[str]:
        """The command here that runs a script of bash there."""
        options = [f"ConnectTimeout={CONNECT_S}", "BatchMode=yes"]  # a password cannot be typed while it trains
        options += [f"ServerAliveInterval={SILENT_S // 4}", "ServerAliveCountMax=4"]
        if self.known:
            options += ["StrictHostKeyChecking=accept-new", f"UserKnownHostsFile={self.known}"]
        port = ["-p", str(self.port)] if self.port else []
        chosen = [word for option in options for word in ("-o", option)]
        return ["ssh", *chosen, *port, "--", self.address, f"bash -ec {shlex.quote(script)}"]

    def run(self, script: str, sent: bytes = b"", timeout_s: float = ANSWER_S) -> bytes:
        """What a script prints there.

        Raises:
            RunError: no connection, no answer in time, or the script failed; with what it said last.
        """
        try:
            done = subprocess.run(self.command(script), input=sent, capture_output=True, timeout=timeout_s)
        except FileNotFoundError:
            raise RunError("ssh: is not installed here -> install OpenSSH's client") from None
        except subprocess.TimeoutExpired:
            said = f"no answer for {timeout_s:g} s -> try again; what runs there goes on"
            raise RunError(f"{self.address}: {said}") from None
        if done.returncode == 0:
            return done.stdout
        said = " ".join(done.stderr.decode(errors="replace").split("\n")[-4:]).strip()[:500]
        if done.returncode == SSH_FAILED:
            said += f" -> see that `ssh {self.address}` works without a password"
        raise RunError(f"{self.address}: {said or f'exit code {done.returncode}'}")

    # -- there ---------------------------------------------------------------------------------------------------------

    def send(self, name: str, given: str, run: Path | None = None) -> None:
        """Put this project's code and the parameters of a run into a new folder there.

        Args:
            given: parameters of the notebook, YAML.
            run: a run's folder to go on with, checkpoints and all.
        """
        place = self._place(name)
        taken = f"has a run {name} already -> choose another logging.name"
        script = f"""[ ! -e {place} ] || {{ echo {shlex.quote(taken)} >&2; exit 3; }}
            mkdir -p {place}; date > {place}/../{LIFE}; tar -xzf - -C {place}"""
        self.run(script, _packed(given, name, run), INSTALL_S)

    def install(self, name: str) -> None:
        """Install the packages that a run's code wants, unless a run before it wanted the same ones."""
        venv = f"../{venv_name()}"
        script = f"""cd {self._place(name)}
            exec 9>{venv}.lock; flock 9  # two runs may be started at once
            if [ ! -e {venv}/.installed ]; then
                {PYTHON}
                $p -m venv {venv}
                {venv}/bin/pip install -q --disable-pip-version-check -c constraints.txt ".[lab]"
                touch {venv}/.installed
            fi
            ln -sfn {venv} venv"""
        self.run(script, timeout_s=INSTALL_S)

    def begin(self, name: str, notebook: str, parameters: Iterable[str] = ()) -> None:
        """Let a run train there, whether or not somebody is connected."""
        arguments = [word for parameter in parameters for word in ("-p", parameter)]
        command = ["venv/bin/python", "-m", "upsnb", "run", notebook, "-f", GIVEN, *arguments, "-o", f"outputs/{name}"]
        inner = f"{shlex.join(command)}; echo $? > {EXIT_CODE}.new; mv {EXIT_CODE}.new {EXIT_CODE}"
        self.run(
            f"""cd {self._place(name)}; date > ../{LIFE}; export PYTHONPATH=$PWD; rm -f {EXIT_CODE}
            setsid nohup bash -c {shlex.quote(inner)} > {OUTPUT} 2>&1 < /dev/null &
            echo $! > {PROCESS}"""
        )

    def state(self, name: str) -> str:
        """starting, running, finished or failed, stopped where its machine was; and the last thing it printed."""
        script = f"""cd {self._place(name)}
            if [ -e {EXIT_CODE} ]; then
                case "$(cat {EXIT_CODE})" in
                    0) echo finished ;;
                    lost) echo stopped ;;
                    *) echo "failed, exit code $(cat {EXIT_CODE})" ;;
                esac
            elif [ ! -e {PROCESS} ]; then echo starting
            elif kill -0 "$(cat {PROCESS})" 2>/dev/null; then echo running
            else echo stopped; fi
            tr '\\r' '\\n' < {OUTPUT} 2>/dev/null | grep -v '^ *$' | tail -n 1 | cut -c1-300"""
        return self.run(script).decode(errors="replace").strip()

    def output(self, name: str, num_lines: int) -> str:
        """What a run printed last."""
        script = f"tr '\\r' '\\n' < {self._place(name)}/{OUTPUT} | tail -n {num_lines:d}"
        return self.run(script).decode(errors="replace").rstrip()

    def stop(self, name: str) -> None:
        """Ask a run, or those that a study trains, to finish their step, save and end."""
        self.run(
            f"""cd {self._place(name)}; stopped=
            for run in outputs/{shlex.quote(name)} outputs/{shlex.quote(name)}/runs/*; do
                [ -e "$run/{runfolder.MANIFEST}" ] || continue
                if PYTHONPATH=$PWD venv/bin/python -m upsnb stop "$run"; then stopped=1; fi
            done
            [ "$stopped" ] || {{ echo "nothing trains there -> python -m upsnb cloud status" >&2; exit 3; }}"""
        )

    def pull(self, name: str, folder: Path) -> int:
        """Bring a run's folder here, what has changed since the last time; returns the bytes that came.

        Each file is compared with the SHA-256 of what was sent, and replaces the one before in one step. Of a run that
        goes on, checkpoints are whole: what came is what their index names.

        Raises:
            RunError: no connection, a file that came otherwise than it was sent, or a name that leads elsewhere.
        """
        place = f"{self._place(name)}/outputs/{name}"
        script, moved = f"python3 {self._place(name)}/upsnb/cloud/there.py", 0
        for _ in range(MOST_TURNS):
            missing = "there is no run folder yet -> python -m upsnb cloud logs says why"
            self.run(f"[ -d {place} ] || {{ echo '{missing}' >&2; exit 3; }}; date > {place}/../../../{LIFE}")
            listed = json.loads(self.run(f"{script} list {place}", timeout_s=INSTALL_S))
            wanted = {file for file, seen in listed.items() if _differs(folder / _inside(file), seen)}
            if CHECKPOINTS in listed and any(file.startswith(runfolder.CHECKPOINTS) for file in wanted):
                wanted.add(CHECKPOINTS)  # tells afterwards whether they were still those that were listed
            wanted = sorted(wanted, key=lambda file: (file == CHECKPOINTS, file))  # what it names is here before it
            came = self._receive(f"{script} send {place}", wanted, folder) if wanted else {}
            moved += sum((folder / file).stat().st_size for file in came)
            if CHECKPOINTS not in wanted or came.get(CHECKPOINTS) == listed[CHECKPOINTS]["sha256"]:
                for path in (folder / runfolder.CHECKPOINTS).glob("*/*"):
                    if path.relative_to(folder).as_posix() not in listed:  # deleted there
                        path.unlink()
                break
        return moved

    def remove(self, name: str) -> None:
        """Delete a run and its code there."""
        self.run(f"rm -rf {self._place(name)}")

    def _place(self, name: str) -> str:
        return f"{shlex.quote(self.folder)}/{shlex.quote(name)}"

    def _receive(self, script: str, wanted: list[str], folder: Path) -> dict[str, str]:
        """Write files of a tar that is sent; their SHA-256 by name."""
        asked, came = set(wanted), {}
        process = subprocess.Popen(self.command(script), stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        try:
            with contextlib.suppress(BrokenPipeError):  # what came, or did not, says why
                process.stdin.write(json.dumps(wanted).encode())
                process.stdin.close()
            with tarfile.open(mode="r|", fileobj=process.stdout) as tar:
                for member in tar:
                    content = tar.extractfile(member)
                    if member.name == SUMS:
                        sent = json.load(content)
                        break
                    if member.name not in asked or content is None:
                        raise RunError(f"{self.address}: sent {member.name!r}, which nobody asked for")
                    path = folder / member.name
                    path.parent.mkdir(parents=True, exist_ok=True)
                    with replacing(path) as file:
                        came[member.name] = sha256_of(content, file.write)
                    os.utime(path, (member.mtime, member.mtime))  # a run is alive whose files are young
                else:
                    raise RunError(f"{self.address}: the connection broke -> pull again, what has come is kept")
        except (tarfile.TarError, EOFError) as error:
            said = f"the connection broke ({error}) -> pull again, what has come is kept"
            raise RunError(f"{self.address}: {said}") from None
        finally:
            process.kill()
            process.wait()
            process.stdout.close()
        if broken := [name for name in came if came[name] != sent.get(name)]:
            for name in broken:
                (folder / name).unlink()
            raise RunError(f"{self.address}: {', '.join(broken[:3])}: arrived otherwise than sent -> pull again")
        return came


def venv_name() -> str:
    """The folder of the packages that this project's code wants, the same for all runs that want the same."""
    wanted = hashlib.sha256()
    for file in ("pyproject.toml", "constraints.txt"):
        wanted.update((runfolder.project_root() / file).read_bytes())
    return f"venv-{wanted.hexdigest()[:12]}"


def _packed(given: str, name: str, run: Path | None) -> bytes:
    """Code, parameters and, to go on with, a run, as a compressed tar."""
    root, packed = runfolder.project_root(), io.BytesIO()

    def kept(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
        name = PurePosixPath(member.name).name
        return None if name in ("__pycache__", ".ipynb_checkpoints", ".lock", KEPT, KNOWN) else member

    with tarfile.open(mode="w:gz", compresslevel=3, fileobj=packed) as tar:
        for part in CODE:
            tar.add(root / part, part, filter=kept)
        for text, file in ((given, GIVEN), (runfolder.code_revision(), runfolder.REVISION)):
            member = tarfile.TarInfo(file)
            member.size = len(text.encode())
            tar.addfile(member, io.BytesIO(text.encode()))
        if run is not None:
            tar.add(run, f"outputs/{name}", filter=kept)
    return packed.getvalue()


def _inside(name: str) -> str:
    """A name from there, refused where it leads out of the folder, or to what this machine keeps of its own."""
    parts = PurePosixPath(name).parts
    if not parts or name.startswith("/") or ".." in parts or "\0" in name or parts[-1] in (KEPT, KNOWN):
        raise RunError(f"{name!r}: a name that no run's folder has -> do not trust that machine")
    return name


def _differs(path: Path, seen: dict) -> bool:
    if not path.is_file() or path.stat().st_size != seen["bytes"]:
        return True
    with open(path, "rb") as file:
        return sha256_of(file) != seen["sha256"]
