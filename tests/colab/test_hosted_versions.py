"""The versions that Colab preinstalls, in an environment of their own: every module, and the panel in their kernel."""

import json
import os
import subprocess
import tempfile
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient
from traitlets.config import Config

from upsnb.runs import runfolder

ROOT = Path(__file__).resolve().parents[2]
PYTHON = ROOT / ".colab" / "bin" / "python"
PINS = dict(
    line.split("==")
    for line in (Path(__file__).parent / "pins.txt").read_text().splitlines()
    if not line.startswith("#")
)
pytestmark = pytest.mark.slow

EVERY_MODULE = """
import importlib, pkgutil, upsnb
modules = [module.name for module in pkgutil.walk_packages(upsnb.__path__, "upsnb.")]
for name in modules:
    importlib.import_module(name)
len(modules)
"""
PANEL = """
from upsnb.runs.handle import Run
from upsnb.widgets.panel import Panel
shown = Panel(Run.attach({!r}))
await shown.watch(2)
"""
VERSIONS = """
import json
from importlib import metadata
print(json.dumps({name: metadata.version(name) for name in NAMES}))
"""


@pytest.fixture(autouse=True)
def environment():
    """`make test` builds it; elsewhere these tests are left out."""
    if not PYTHON.exists():
        reason = "there is no .colab -> make .colab/.installed"
        pytest.fail(reason) if os.environ.get("CI") else pytest.skip(reason)


@pytest.fixture
def execute(tmp_path, monkeypatch):
    """`execute(source, ...)`: run cells in that environment's kernel; a cell's error is the test's. The last result."""
    spec = tmp_path / "jupyter" / "kernels" / "colab" / "kernel.json"
    spec.parent.mkdir(parents=True)
    arguments = [str(PYTHON), "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    variables = {"COLAB_RELEASE_TAG": "1", "PYTHONPATH": str(ROOT), "IPYTHONDIR": str(tmp_path / "ipython")}
    spec.write_text(json.dumps({"argv": arguments, "display_name": "Colab", "language": "python", "env": variables}))
    monkeypatch.setenv("JUPYTER_PATH", str(tmp_path / "jupyter"))

    def run(*sources: str) -> nbformat.NotebookNode:
        notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source) for source in sources])
        with tempfile.TemporaryDirectory() as sockets:  # instead of ports, which another test may take meanwhile
            config = Config(KernelManager={"transport": "ipc", "ip": f"{sockets}/kernel"})
            where = {"metadata": {"path": tmp_path}}
            NotebookClient(notebook, kernel_name="colab", resources=where, config=config).execute()
        return notebook.cells[-1].outputs

    return run


def test_environment_has_the_pinned_versions():
    code = VERSIONS.replace("NAMES", repr(list(PINS)))
    done = subprocess.run([PYTHON, "-c", code], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == PINS


def test_every_module_is_imported(execute):
    (output,) = execute(EVERY_MODULE)
    assert int(output.data["text/plain"]) > 40


def test_panel_follows_a_run_in_an_old_kernel_and_leaves_a_figure(execute, tmp_path, tiny_config, train_here):
    folder = tmp_path / "run"
    train_here(tiny_config(), folder)
    runfolder.update_manifest(folder, status="finished")
    outputs = execute("import ipywidgets\nassert ipywidgets.__version__ == '7.7.1'", PANEL.format(str(folder)))
    assert any("image/png" in output.get("data", {}) for output in outputs), "the still figure in the widgets' place"
    assert outputs[-1].data["text/plain"] == "'finished'"
