"""Kept evidence: what is copied, that no path of a machine is in it, and the minutes that are read from it."""

import base64
import copy
import json
from pathlib import Path

import keep
import nbformat
import pytest
import readme
import yaml
from papermill.iorw import load_notebook_node
from papermill.parameterize import parameterize_notebook

from upsnb.errors import RunError
from upsnb.runs import runfolder

ROOT = runfolder.project_root()
KEPT = sorted(path for path in keep.REFERENCE.rglob("*") if path.is_file())
PICTURE = base64.b64encode(b"any bytes").decode() + "/tmp/is/chance"
HERE = {"device": "cpu", "num_cores": readme.CORES}


def executed(folder: Path, text: str = "", name: str = "01_train", root: Path = ROOT, **given) -> Path:
    """A run folder as `python -m upsnb run` leaves it, but for the outputs of its cells."""
    notebook = load_notebook_node(str(ROOT / "notebooks" / f"{name}.ipynb"))
    notebook = parameterize_notebook(
        copy.deepcopy(notebook), {"run_folder": str(folder), **given}, "", "python3", "python"
    )
    notebook.metadata.papermill |= {
        "input_path": str(root / "notebooks" / f"{name}.ipynb"),
        "output_path": str(folder / "notebook.ipynb"),
        "duration": 150.0,
        "exception": None,
    }
    notebook.metadata.widgets = {"application/vnd.jupyter.widget-state+json": {"state": {}}}
    output = nbformat.v4.new_output("stream", text=f"Run('{folder}', finished)\n{text}")
    picture = nbformat.v4.new_output("display_data", {"image/png": PICTURE, "text/plain": f"{root}/x.png"})
    notebook.cells[-1].outputs = [output, picture]
    (folder / "figures").mkdir(parents=True)
    nbformat.write(notebook, folder / "notebook.ipynb")
    (folder / "figures/losses.png").write_bytes(b"a picture")
    report = {"hardware": HERE, "cause": f"{folder}/worker.log says so"}
    (folder / "report.json").write_text(json.dumps(report))
    return folder


@pytest.mark.parametrize("path", KEPT, ids=[str(path.relative_to(keep.REFERENCE)) for path in KEPT])
def test_no_kept_file_names_a_path_of_a_machine(path):
    if path.suffix in (".json", ".ipynb"):
        assert keep.machine_paths(json.loads(path.read_text())) == []
    else:
        assert keep.machine_paths(path.read_bytes().decode("latin-1")) == []


@pytest.mark.parametrize(
    "text", ["/work/x", "at /tmp/run", "'/home/me/x'", "(/root/.cache)", "file:///Users/me", "/usr/lib/python3"]
)
def test_paths_of_machines_are_found(text):
    assert keep.machine_paths({"a": [{"text": text}]})


@pytest.mark.parametrize(
    "text", ["outputs/tmp/x", "and/or", "km/home/h", "../tmp/x", "samples/s", "https://a.org/tmp/x"]
)
def test_other_slashes_are_no_paths_of_machines(text):
    assert not keep.machine_paths(text)


@pytest.mark.parametrize("root", [ROOT, Path("/srv/another clone")])
def test_paths_of_project_and_run_folder_become_relative_and_pictures_stay(root, tmp_path):
    """`root`: the clone that the run was made in; its run folder lies outside of it."""
    folder = executed(tmp_path / "quick-1", f"{root} and {root}/outputs/x, {root}-2 is another", root=root)
    (folder / "notebook.ipynb").write_text((folder / "notebook.ipynb").read_text().replace(f"{root}-2", "that"))
    files = keep.keep(folder, "quick", tmp_path / "kept")
    assert [path.name for path in files] == ["report.json", "notebook.ipynb", "losses.png"]
    kept = json.loads((tmp_path / "kept/quick/notebook.ipynb").read_text())
    papermill = kept["metadata"]["papermill"]
    assert "widgets" not in kept["metadata"]
    assert papermill["input_path"] == "notebooks/01_train.ipynb"
    assert papermill["output_path"] == "quick-1/notebook.ipynb" and papermill["parameters"]["run_folder"] == "quick-1"
    stream, picture = kept["cells"][-1]["outputs"]
    assert "".join(stream["text"]) == "Run('quick-1', finished)\n. and outputs/x, that is another"
    assert picture["data"]["image/png"].strip() == PICTURE and picture["data"]["text/plain"] == ["x.png"]
    assert json.loads((tmp_path / "kept/quick/report.json").read_text())["cause"] == "quick-1/worker.log says so"
    nbformat.validate(nbformat.from_dict(kept))


def test_folders_that_only_begin_alike_are_not_shortened():
    assert keep.relative(["/a/b", "/a/b/", "/a/bc/x", "/a/b-2"], Path("/a/b/run"), {Path("/a/b")}) == [
        *(".", "", "/a/bc/x", "/a/b-2")
    ]


def test_what_was_kept_before_is_replaced(tmp_path):
    (tmp_path / "kept/quick").mkdir(parents=True)
    (tmp_path / "kept/quick/of_another_run.png").write_bytes(b"old")
    keep.keep(executed(tmp_path / "run"), "quick", tmp_path / "kept")
    assert not (tmp_path / "kept/quick/of_another_run.png").exists()


def test_other_paths_failures_and_gaps_are_refused_and_nothing_is_written(tmp_path):
    refused = executed(tmp_path / "warned", "/opt/python/lib/x.py:3: UserWarning")
    with pytest.raises(RunError, match=r"notebook.ipynb: /opt/python/lib/x.py:3"):
        keep.keep(refused, "quick", tmp_path / "kept")
    failed = executed(tmp_path / "failed")
    text = (failed / "notebook.ipynb").read_text().replace('"exception": null', '"exception": true')
    (failed / "notebook.ipynb").write_text(text)
    with pytest.raises(RunError, match="failed -> run it again"):
        keep.keep(failed, "quick", tmp_path / "kept")
    (failed / "report.json").unlink()
    with pytest.raises(RunError, match="has no report.json"):
        keep.keep(failed, "quick", tmp_path / "kept")
    assert not (tmp_path / "kept").exists()


def test_minutes_are_those_of_kept_notebooks_on_two_cores(tmp_path):
    assert readme.minutes("01_train", tmp_path) == []
    assert "not measured" in readme.notebooks(tmp_path)
    keep.keep(executed(tmp_path / "a"), "quick", tmp_path / "kept")
    keep.keep(executed(tmp_path / "b", name="04_phases", block_s=5.0), "phases", tmp_path / "kept")
    larger = executed(tmp_path / "c")
    (larger / "report.json").write_text(json.dumps({"hardware": {**HERE, "num_cores": 16}}))
    keep.keep(larger, "quick-16", tmp_path / "kept")
    rows = readme.notebooks(tmp_path / "kept").splitlines()
    (train,) = [row for row in rows if "01_train" in row]
    assert train.startswith("| `notebooks/01_train.ipynb` | Train one ") and train.endswith(" | 2.5 |")
    (phases,) = [row for row in rows if "04_phases" in row]
    assert phases.endswith(" | 2.5 (block_s 5.0) |")


def test_settings_of_a_kept_notebook_are_told_briefly(tmp_path):
    """A params file by its name, unless it is the notebook's own preset; long lists and datasets never."""

    def told(folder: str, file: str = "", **more) -> list[str]:
        values = yaml.safe_load((ROOT / f"params/{file}.yaml").read_text()) if file else {}
        path = executed(tmp_path / folder, **{**values, "preset": "", **more}) / "notebook.ipynb"
        return readme.given(json.loads(path.read_text()))

    quick = yaml.safe_load((ROOT / "params/quick.yaml").read_text())
    assert told("same", "quick") == []
    assert told("shorter", "quick", training={**quick["training"], "time_limit_s": 20}) == ["time_limit_s 20"]
    assert told("files", "pdebench_files", seeds=[42]) == ["pdebench_files", "1 seed"]
    assert told("own", training=dict.fromkeys(("batch_size", "accum_steps", "seed", "num_gpus", "num_workers"), 1)) == [
        "other settings"
    ]
