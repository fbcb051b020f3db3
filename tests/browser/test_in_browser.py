"""The training notebook as a reader meets it: in a browser, run from top to bottom."""

import nbformat
from jupyterlab_page import ROOT, Lab


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
    assert len(widths) == 11 and min(widths) > 300, "drawn, loaded and decoded"
