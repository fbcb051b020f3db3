"""JupyterLab on loopback, and a person in front of it."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
import uuid
from pathlib import Path

import nbformat
from waiting import LONGEST_S

ROOT = Path(__file__).resolve().parents[2]
MARK = "UPSNB_BROWSER_TEST"  # in the environment of the server and of all that it starts, runs included
SETTINGS = {
    "apputils-extension/notification": {"fetchNews": "false", "checkForUpdates": False, "doNotDisturbMode": True},
    "docmanager-extension/plugin": {"autosave": False},
    "notebook-extension/tracker": {"windowingMode": "none"},  # cells out of sight are in the page all the same
}
SHOTS = ROOT / "outputs" / "browser"  # screenshots


@contextlib.contextmanager
def server(folder: Path, project: Path | None = None):
    """The address of a server of this test's own, with its token; no process of it is left behind.

    Args:
        project: a clone whose `make lab` starts it, with its own settings.
    """
    token = uuid.uuid4().hex
    homes = {"JUPYTER_CONFIG_DIR": "config", "JUPYTER_RUNTIME_DIR": "runtime", "IPYTHONDIR": "ipython"}
    homes |= {"JUPYTERLAB_SETTINGS_DIR": "settings", "JUPYTERLAB_WORKSPACES_DIR": "workspaces"}
    environment = {**os.environ, **{name: str(folder / "jupyter" / home) for name, home in homes.items()}}
    environment |= {MARK: token, "PYTHONPATH": str(project or ROOT)}
    for name, values in SETTINGS.items():
        if project and "docmanager" in name:
            continue  # as it comes with the project
        path = folder / "jupyter" / "settings" / "@jupyterlab" / f"{name}.jupyterlab-settings"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(values))
    options = ["--no-browser", "--expose-app-in-browser", "--LabApp.extension_manager=readonly"]
    options += ["--ServerApp.ip=127.0.0.1", "--ServerApp.port=0", f"--IdentityProvider.token={token}"]
    command = [sys.executable, "-m", "jupyterlab", *options, "--allow-root", f"--ServerApp.root_dir={folder}"]
    if project:
        command = ["make", "lab", f"LAB_ARGS={' '.join(options)}"]
        command += ["--assume-old=.venv/.installed", "--assume-old=.venv/bin/python"]  # whatever git wrote later
    with open(folder / "server.log", "w") as log:
        process = subprocess.Popen(command, cwd=project or folder, env=environment, stdout=log, stderr=log)
    try:
        yield _address(folder, process, token)
    finally:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(10)
        _end(token)
        process.wait()


def _address(folder: Path, server: subprocess.Popen, token: str) -> str:
    """Where the server answers, from the file it writes."""
    deadline = time.monotonic() + LONGEST_S
    while time.monotonic() < deadline and server.poll() is None:
        with contextlib.suppress(OSError, ValueError):
            (file,) = (folder / "jupyter" / "runtime").glob("jpserver-*.json")
            port = json.loads(file.read_text())["port"]
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/api/status?token={token}", timeout=5):
                return f"http://127.0.0.1:{port}/lab?token={token}"
        time.sleep(0.1)
    raise AssertionError(f"JupyterLab did not start:\n{(folder / 'server.log').read_text()[-2000:]}")


def _end(token: str) -> None:
    """End whatever the server left: kernels, supervisors, ranks."""
    mark = f"{MARK}={token}".encode()
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # gone meanwhile
            if mark in (path / "environ").read_bytes().split(b"\0"):
                os.kill(int(path.name), signal.SIGKILL)


class Lab:
    """JupyterLab as a person uses it: notebooks, cells, clicks, reloads."""

    def __init__(self, page, url: str, folder: Path):
        self.page, self.url, self.folder = page, url, folder
        page.set_default_timeout(1e3 * LONGEST_S)

    def open(self, name: str, *sources: str) -> None:
        """Open a notebook below the test's folder; a new one with these cells, where sources are given."""
        if sources:
            cells = [nbformat.v4.new_code_cell(source) for source in sources]
            kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
            nbformat.write(nbformat.v4.new_notebook(cells=cells, metadata={"kernelspec": kernel}), self.folder / name)
        self.page.goto(self.url.replace("/lab?", f"/lab/tree/{name}?"))
        # One that was open before comes back first.
        self.page.wait_for_function("name => window.jupyterapp?.shell.currentWidget?.context?.path === name", arg=name)
        self._await_kernel()

    def reload(self) -> None:
        """Reload the page, as after a broken connection; the kernel goes on."""
        self.page.reload()
        self._await_kernel()

    def _await_kernel(self) -> None:
        self.page.wait_for_function(
            "() => ['idle', 'busy'].includes("
            "window.jupyterapp?.shell.currentWidget?.context?.sessionContext.session?.kernel?.status)"
        )

    def run_all(self, wait: bool = True) -> None:
        """Run all cells, and wait for the last one."""
        self.page.evaluate("() => { window.ran = null; window.jupyterapp.commands"
                           ".execute('notebook:run-all-cells').then(() => { window.ran = true }) }")  # fmt: skip
        if wait:
            self.page.wait_for_function("() => window.ran")

    def save(self) -> None:
        """Save the notebook, as a person does."""
        self.page.keyboard.press("Control+s")
        self.page.wait_for_function("() => !window.jupyterapp.shell.currentWidget.context.model.dirty")

    def run(self, source: str, wait: bool = True) -> None:
        """Run a new cell at the notebook's end."""
        self.page.evaluate(
            """async (source) => {
                const {commands, shell} = window.jupyterapp, {content} = shell.currentWidget;
                content.activeCellIndex = content.widgets.length - 1;
                await commands.execute('notebook:insert-cell-below');
                content.activeCell.model.sharedModel.setSource(source);
                window.ran = null;
                commands.execute('notebook:run-cell').then(() => { window.ran = true });
            }""",
            source,
        )
        if wait:
            self.page.wait_for_function("() => window.ran")

    def cells(self) -> list[nbformat.NotebookNode]:
        """The cells as the page holds them, outputs included."""
        content = self.page.evaluate("() => window.jupyterapp.shell.currentWidget.content.model.toJSON()")
        return nbformat.from_dict(content).cells

    def errors(self) -> list[str]:
        """What cells raised."""
        outputs = [output for cell in self.cells() for output in cell.get("outputs", ())]
        return [f"{output.ename}: {output.evalue}" for output in outputs if output.output_type == "error"]

    def shot(self, name: str) -> Path:
        """Keep a picture of the page."""
        SHOTS.mkdir(parents=True, exist_ok=True)
        self.page.screenshot(path=SHOTS / f"{name}.png")
        return SHOTS / f"{name}.png"
