"""A notebook on a hosted machine, such as Colab: packages that it lacks, beside the torch that is preinstalled.

The first cell of every notebook calls this, on Colab alone, after it has fetched the project there.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from importlib import metadata
from pathlib import Path

from upsnb.errors import RunError
from upsnb.overlays import project_root


def install() -> None:
    """Install what is missing, change nothing that is there, and print what there is to train on.

    Versions that a running kernel has imported already, torch's among them, are the ones that Colab's own kernels and
    drivers were made for: they are held.

    Raises:
        RunError: pip failed, for example because something that is there is too old; with its words.
    """
    held = _held()
    with tempfile.TemporaryDirectory() as work:
        constraints = Path(work) / "held.txt"
        constraints.write_text("\n".join(held) + "\n")
        command = [sys.executable, "-m", "pip", "install", "-q", "-e", str(project_root()), "-c", str(constraints)]
        done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        said = [line for line in done.stderr.splitlines() if line.startswith("ERROR")] or done.stderr.splitlines()
        raise RunError(f"pip: {' '.join(said[-3:])[:500]} -> a newer hosted machine, or one of your own")
    print(f"{next((version for version in held if version.startswith('torch==')), 'torch, new')}; {_gpus()}")


def _held() -> list[str]:
    """What this project depends on and is there, with its version."""
    with open(project_root() / "pyproject.toml", "rb") as file:
        wanted = tomllib.load(file)["project"]["dependencies"]
    found = []
    for name in (re.match(r"[\w.-]+", line)[0] for line in wanted):
        try:
            found.append(f"{name}=={metadata.version(name)}")
        except metadata.PackageNotFoundError:
            continue
    return found


def _gpus() -> str:
    """What nvidia-smi says is there, without torch, which takes seconds to load."""
    none = "no GPU: it trains on the CPU. Colab has GPUs under Runtime > Change runtime type"
    if shutil.which("nvidia-smi") is None:
        return none
    told = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True).stdout
    return "; ".join(re.findall(r"^GPU \d+: (.+?)(?: \(UUID|$)", told, re.MULTILINE)) or none
