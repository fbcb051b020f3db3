"""The first cell of every notebook, as Colab runs it: with google.colab, pip and nvidia-smi of the test's own."""

import ast
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import badges
import pytest

from upsnb.overlays import project_root

ROOT = project_root()
SECRET = "https://a-secret-token@example.invalid/upsnb.git"
FAKE = {
    "google/colab/userdata.py": "import os\nget = lambda name: os.environ['SECRET_' + name]\n",
    "pip/__init__.py": "",
    "pip/__main__.py": (
        "import os, pathlib, sys\n"
        "held = pathlib.Path(sys.argv[sys.argv.index('-c') + 1]).read_text()\n"
        "pathlib.Path(os.environ['ASKED']).write_text(' '.join(sys.argv[1:]) + '\\n' + held)\n"
        "said = os.environ.get('PIP_SAYS', '')\n"
        "sys.exit(said or 0)\n"
    ),
}


def cells(root: Path = ROOT) -> dict[str, str]:
    found = {}
    for path in sorted((root / "notebooks").glob("*.ipynb")):
        (source,) = (
            c["source"] for c in json.loads(path.read_text())["cells"] if "colab" in c["metadata"].get("tags", ())
        )
        found[path.name] = "".join(source)
    return found


@pytest.fixture
def colab(tmp_path):
    """`colab(**environment)`: the cell in a process that looks like Colab's; its /content is a folder of the test."""
    for name, text in FAKE.items():
        (tmp_path / "fake" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "fake" / name).write_text(text)
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/nvidia-smi").write_text("#!/bin/sh\necho 'GPU 0: NVIDIA A100-SXM4-40GB (UUID: GPU-1)'\n")
    (tmp_path / "bin/nvidia-smi").chmod(0o755)
    (tmp_path / "elsewhere").mkdir()

    def run(repository: str, root: Path = ROOT, **environment) -> subprocess.CompletedProcess:
        source = next(iter(cells(root).values())).replace("/content", str(tmp_path / "content"))
        source += "\nprint(os.getcwd(), 'torch' in sys.modules)"
        own = {
            "PATH": f"{tmp_path}/bin:{os.environ['PATH']}",
            "PYTHONPATH": str(tmp_path / "fake"),
            "COLAB_RELEASE_TAG": "release-colab-external-images_20261101",
            "SECRET_UPSNB_REPOSITORY": repository,
            "ASKED": str(tmp_path / "asked"),
            "PIP_DRY_RUN": "1",  # should it ever be the real one
        }
        (tmp_path / "content").mkdir(exist_ok=True)
        return subprocess.run(
            [sys.executable, "-c", source],
            cwd=tmp_path / "elsewhere",
            env=os.environ | own | environment,
            capture_output=True,
            text=True,
        )

    return run


@pytest.fixture
def repository(tmp_path) -> str:
    """What a clone has, of this code as it is."""
    folder = tmp_path / "repository"
    folder.mkdir()
    for name in ("upsnb", "notebooks", "params"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", folder)
    shutil.copy(ROOT / "README.md", folder)
    git(folder, "init", "-q")
    commit(folder, "all")
    return str(folder)


def git(folder: Path | str, *command: str) -> str:
    return subprocess.run(["git", *command], cwd=folder, check=True, capture_output=True, text=True).stdout


def commit(folder: Path | str, subject: str) -> None:
    git(folder, "add", "-A")
    git(folder, "-c", "user.name=test", "-c", "user.email=test@example.invalid", "commit", "-qm", subject)


def test_it_is_the_same_everywhere_and_does_nothing_elsewhere(tmp_path):
    (source,) = set(cells().values())
    environment = {name: value for name, value in os.environ.items() if name != "COLAB_RELEASE_TAG"}
    code = f"{source}\nprint(os.getcwd(), sorted(set(sys.modules) & {{'google', 'upsnb', 'torch'}}))"
    done = subprocess.run(
        [sys.executable, "-I", "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert done.stdout == f"{tmp_path} []\n" and not done.stderr


def test_it_fetches_the_project_holds_what_is_there_and_says_what_gpu_it_found(colab, repository, tmp_path):
    done = colab(repository)
    assert done.returncode == 0, done.stderr
    assert "NVIDIA A100-SXM4-40GB" in done.stdout and "UUID" not in done.stdout
    assert f"{tmp_path}/content/upsnb False" in done.stdout, "in the project, and without loading torch"
    command, *held = (tmp_path / "asked").read_text().splitlines()
    assert command.startswith(f"install -q -e {tmp_path}/content/upsnb -c ")
    assert {line.partition("==")[0] for line in held} >= {"torch", "numpy", "pandas"} and all(
        "==" in line for line in held
    )
    mine = Path(tmp_path / "content/upsnb/mine.txt")
    mine.write_text("kept")
    assert colab("nowhere").returncode == 0 and mine.exists(), "a kernel that starts again fetches nothing"


def test_without_a_gpu_it_says_where_colab_has_them(colab, repository, tmp_path):
    (tmp_path / "bin/nvidia-smi").write_text("#!/bin/sh\necho 'NVIDIA-SMI has failed'; exit 9\n")
    assert "Change runtime type" in colab(repository).stdout


def test_a_wrong_address_is_said_without_showing_it(colab):
    done = colab(SECRET)
    assert done.returncode and "what does UPSNB_REPOSITORY say?" in done.stderr
    assert "a-secret-token" not in done.stdout + done.stderr


def test_what_pip_refuses_is_said(colab, repository):
    done = colab(repository, PIP_SAYS="ERROR: Cannot install torch>=2.11 and torch==2.2")
    assert done.returncode and "RunError: pip: ERROR: Cannot install torch>=2.11" in done.stderr


# -- badges ------------------------------------------------------------------------------------------------------------


def test_a_public_copy_is_fetched_at_its_notebooks_own_revision_without_a_secret(colab, repository, tmp_path):
    badges.write(Path(repository), "me/upsnb", "v1.0")
    commit(repository, "badges")
    git(repository, "tag", "v1.0")
    (Path(repository) / "later.txt").write_text("of the next version")
    commit(repository, "later")
    elsewhere = {
        "GIT_CONFIG_COUNT": "1",
        "GIT_CONFIG_KEY_0": f"url.{repository}.insteadOf",
        "GIT_CONFIG_VALUE_0": "https://github.com/me/upsnb.git",
    }
    done = colab("nowhere", Path(repository), **elsewhere)
    assert done.returncode == 0, done.stderr
    fetched = tmp_path / "content/upsnb"
    assert git(fetched, "rev-parse", "HEAD") == git(repository, "rev-parse", "v1.0")
    assert not (fetched / "later.txt").exists()


def test_each_notebook_has_a_badge_that_opens_it_and_all_of_them_can_be_taken_out(repository):
    root = Path(repository)
    badges.write(root, "me/upsnb", "v1.0")
    said = (root / "README.md").read_text()
    opened = re.findall(r"\(https://colab.research.google.com/github/me/upsnb/blob/v1.0/(notebooks/\w+.ipynb)\)", said)
    assert sorted(opened) == sorted(path.relative_to(root).as_posix() for path in root.glob("notebooks/*.ipynb"))
    badges.write(root, "", "")
    assert not git(root, "status", "--short"), "as it was before"


def test_nothing_it_names_is_taken_for_a_setting():
    """A public name of plain data would be one (`overlays.of_notebook`)."""
    names = [node.id for node in ast.walk(ast.parse(next(iter(cells().values())))) if isinstance(node, ast.Name)]
    bound = {name for name in names if name not in ("os", "subprocess", "sys", "userdata", "upsnb")}
    assert bound and all(name.startswith("_") for name in bound), bound
