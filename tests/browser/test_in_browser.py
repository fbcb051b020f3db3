"""The training notebook as a reader meets it: in a browser, run from top to bottom."""

import subprocess
import time

import nbformat
import pytest
from jupyterlab_page import ROOT, Lab, server
from waiting import until

SAVED = "() => !window.jupyterapp.shell.currentWidget.context.model.dirty"


def test_all_cells_run_and_every_figure_is_in_the_page(lab: Lab):
    notebook = nbformat.read(ROOT / "notebooks" / "01_train.ipynb", as_version=4)
    (parameters,) = [cell for cell in notebook.cells if "parameters" in cell.metadata.get("tags", ())]
    # A number of steps instead of a time: as good on a busy machine as on a quiet one.
    parameters.source += f"""
preset = "smoke"
logging = {{"root": {str(lab.folder / "outputs")!r}}}
training, stages = {{"time_limit_s": None, "threads_per_rank": 1}}, {{"operator": {{"epochs": 3}}}}"""
    nbformat.write(notebook, lab.folder / "01_train.ipynb")
    lab.open("01_train.ipynb")
    lab.run_all()
    assert lab.errors() == []
    code = [cell for cell in lab.cells() if cell.cell_type == "code" and cell.source]
    assert all(cell.execution_count for cell in code), "a cell was not run"
    widths = lab.page.eval_on_selector_all(".jp-OutputArea-output img", "all => all.map(image => image.naturalWidth)")
    assert len(widths) == 12 and min(widths) > 300, "drawn, loaded and decoded"


@pytest.fixture
def project(tmp_path):
    """A clone of this repository whose environment was made before."""
    clone = tmp_path / "clone"
    subprocess.run(["git", "clone", "--quiet", "--no-local", "--depth=1", f"file://{ROOT}", clone], check=True)
    (clone / ".venv").symlink_to((ROOT / ".venv").resolve())
    notebook = clone / "notebooks" / "01_train.ipynb"
    notebook.write_text(notebook.read_text().replace("time_limit_s: float = None", "time_limit_s: float = 3600.0"))
    return clone


@pytest.mark.long
def test_a_first_flip_is_measured_in_a_clone_and_its_notebook_saves_itself(project, tmp_path, chromium):
    """As somebody does who has just cloned it; the seconds are printed, and nothing is asserted about them."""
    since = time.monotonic()
    with server(tmp_path, project) as url:
        lab = Lab(chromium.new_page(viewport={"width": 1400, "height": 1000}), url, tmp_path)
        lab.open("notebooks/01_train.ipynb")
        lab.page.locator(".jp-Cell").first.click()
        (panel_cell,) = [k for k, cell in enumerate(lab.cells()) if "panel.start()" in cell.source]
        for _ in range(panel_cell + 1):
            lab.page.keyboard.press("Shift+Enter")
        until(lambda: lab.page.locator(".ups-plots").count() or lab.errors(), "no panel")
        assert lab.errors() == []
        print(f"{time.monotonic() - since:.0f} s after make lab: the panel", flush=True)
        until(lambda: "steady steps" not in lab.page.locator(".ups-plots").inner_text(), "no steady steps")
        lab.page.locator(".ups-loss_frequency").click()
        until(lambda: "[" in lab.page.locator(".ups-table").inner_text(), "no effect was measured")
        print(f"{time.monotonic() - since:.0f} s after make lab: the first measured flip", flush=True)
        lab.shot("first_flip")
        lab.page.wait_for_function(SAVED)  # by itself: a reloaded page shows what was saved
        lab.page.context.close()
