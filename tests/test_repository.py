"""The repository's own rules: pinned versions, one-way imports, files one can read, notebooks without outputs."""

import ast
import graphlib
import json
import re
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from upsnb import __main__ as command
from upsnb import hardware, overlays, phases
from upsnb.config import RunConfig
from upsnb.data import datasets
from upsnb.data.families import FAMILIES
from upsnb.errors import ConfigError, Problem

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
APART = sum(
    map(EXTRAS.pop, ("neuralop", "optuna", "tensorboard", "mlflow", "wandb", "pack", "onnx", "hub")), []
)  # tested with other pins
REQUIREMENTS = [Requirement(line) for line in sum(EXTRAS.values(), PROJECT["dependencies"])]


def pins(name: str) -> dict[str, str]:
    """A file's packages and their versions."""
    return dict(line.split("==") for line in (ROOT / name).read_text().splitlines() if not line.startswith("#"))


PINS = pins("constraints.txt")
OWNERS = {"yaml": "PyYAML", "pydantic_core": "pydantic", "typing_extensions": "pydantic"}  # package: what installs it
MODULES = {
    ".".join(path.relative_to(ROOT / "upsnb").with_suffix("").parts): path
    for path in sorted((ROOT / "upsnb").rglob("*.py"))
    if path.name != "__init__.py"
}
PARAMS = sorted((ROOT / "params").glob("*.yaml"))
OF_FAMILIES = sorted((ROOT / "params/family").glob("*.yaml"))
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")])

ROOMS = (
    *("cloud", "worker", "compare", "profile", "memory", "widgets", "report"),
    *("training", "runs", "models", "data", "solvers", ""),
)
ROOFS = {"__main__", "commands"}  # of the whole house: may enter every room
STAIRS = {  # the only imports upwards, each inside a function, and why
    ("config", "data.families"): "a config is checked against the table of families",
    ("rules", "data.families"): "and its physics terms against the priors of their rows",
    ("rules", "data.custom"): "and what a row of a user's own says against itself",
    ("runs.handle", "training.trained"): "a run's folder is where people look for its model, and readers need no torch",
    ("runs.handle", "training.preflight"): "what is wrong with a model is said before its run has a folder",
}
MOST_LINES = 500  # an aim: a file is one subject, and one that a reader takes in


def ids(paths):
    return [path.name for path in paths]


def imports(path: Path) -> set[str]:
    """Dotted names a file imports, at its top or inside functions; `from a import b` counts as `a.b`."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


# -- versions ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("requirement", REQUIREMENTS, ids=str)
def test_every_dependency_is_pinned_inside_its_range(requirement):
    pinned = {canonicalize_name(name): version for name, version in PINS.items()}
    assert requirement.specifier.contains(pinned[canonicalize_name(requirement.name)])


@pytest.mark.parametrize("name", ["constraints.txt", "tests/extras/pins.txt"])
def test_pins_are_exact_public_and_sorted(name):
    for package, version in pins(name).items():
        assert re.fullmatch(r"[\d.]+(\.?(post|rc|b)\d+)?", version), f"{package}=={version}"
    assert list(pins(name)) == sorted(pins(name), key=str.lower)


def test_what_is_tested_apart_is_pinned_apart_inside_its_range():
    for requirement in map(Requirement, APART):
        pinned = {canonicalize_name(name): version for name, version in pins("tests/extras/pins.txt").items()}
        assert requirement.specifier.contains(pinned[canonicalize_name(requirement.name)])
    assert not pins("tests/extras/pins.txt").keys() & PINS.keys()


def test_nothing_is_pinned_that_nothing_needs():
    needed, absent, todo = set(), set(), list(REQUIREMENTS)
    pinned = {canonicalize_name(name) for name in PINS}
    while todo:
        requirement = todo.pop()
        name = canonicalize_name(requirement.name)
        try:
            inner = metadata.distribution(name).requires or []
        except metadata.PackageNotFoundError:
            absent.add(name)  # needed on another system only, unless it is pinned
            continue
        if (name, *requirement.extras) in needed:
            continue
        needed |= {(name,), (name, *requirement.extras)}
        for found in map(Requirement, inner):
            extras = {"", *requirement.extras}
            if found.marker is None or any(found.marker.evaluate({"extra": extra}) for extra in extras):
                todo.append(found)
    if absent & pinned:
        pytest.skip(f"pinned and not installed: {', '.join(sorted(absent & pinned))} -> make")
    assert pinned <= {name for name, *_ in needed}


def test_conda_environment_installs_the_same_pins():
    environment = yaml.safe_load((ROOT / "environment.yml").read_text())
    assert environment["dependencies"][-1] == {"pip": ["-c constraints.txt", "-e .[lab,test]"]}
    minimum = PROJECT["requires-python"].removeprefix(">=")
    assert f"python={minimum}" in environment["dependencies"]


def test_hosted_notebooks_need_no_other_versions():
    hosted = {"torch": "2.11", "torchao": "0.10", "ipywidgets": "7.7.1", "numpy": "2.1", "matplotlib": "3.10",
              "h5py": "3.16", "pydantic": "2.13", "pyyaml": "6.0"}  # fmt: skip
    base = {canonicalize_name(r.name): r for r in map(Requirement, PROJECT["dependencies"])}
    assert all(base[name].specifier.contains(version) for name, version in hosted.items())
    assert "ipykernel" not in base


# -- modules -------------------------------------------------------------------------------------------------------


def room(module: str) -> str:
    """The room of a module; what stands at the root of the package is the ground floor."""
    return module.rpartition(".")[0]


def imported_modules(module: str) -> set[str]:
    """Modules of this package that one imports, at its top or inside functions."""
    names = {name.removeprefix("upsnb.") for name in imports(MODULES[module]) if name.startswith("upsnb.")}
    return {name if name in MODULES else name.rpartition(".")[0] for name in names}


@pytest.mark.parametrize("module", MODULES)
def test_imports_flow_one_way(module):
    assert room(module) in ROOMS, f"upsnb/{room(module)}: is no room of the house"
    for found in imported_modules(module):
        assert found in MODULES, f"upsnb.{found} does not exist"
        if module in ROOFS or (module, found) in STAIRS:
            continue
        assert found not in ROOFS and ROOMS.index(room(found)) >= ROOMS.index(room(module)), (
            f"{module} imports {found}, whose room stands above"
        )


def test_no_module_imports_itself_through_others():
    graph = {module: imported_modules(module) for module in MODULES}
    for above, below in STAIRS:
        assert below in graph[above], f"{above} imports {below} no longer"
        graph[above].remove(below)
    try:
        tuple(graphlib.TopologicalSorter(graph).static_order())
    except graphlib.CycleError as error:
        raise AssertionError(" -> ".join(error.args[1])) from None


def test_only_declared_packages_are_imported():
    declared = {canonicalize_name(Requirement(line).name) for line in PROJECT["dependencies"]}
    extra = {
        "ipywidgets": {"widgets.panel", "widgets.fields", "widgets.browser"},
        "IPython": {"widgets.panel", "widgets.browser"},
        "papermill": {"__main__"},
        "nbclient": {"__main__"},
        "traitlets": {"__main__"},
        "optuna": {"compare.suggest"},
        "mlflow": {"widgets.export"},
        "wandb": {"widgets.export"},
        "safetensors": {"training.packed"},
        "huggingface_hub": {"report.pack"},
    }
    for module, path in MODULES.items():
        for name in {name.split(".")[0] for name in imports(path)} - sys.stdlib_module_names - {"upsnb"}:
            if name in extra:
                assert module in extra[name], f"{module} imports {name}: only {extra[name]} may"
            else:
                assert canonicalize_name(OWNERS.get(name, name)) in declared, f"{module} imports {name}"


def test_no_two_files_of_tests_have_one_name():
    """pytest imports them by name: the second would not be collected, and say so when all others have passed."""
    names = [path.name for path in (ROOT / "tests").rglob("test_*.py")]
    assert sorted(set(names)) == sorted(names)


def test_packages_are_empty_and_all_installed():
    folders = sorted(path.parent for path in (ROOT / "upsnb").rglob("*.py"))
    names = sorted({".".join(folder.relative_to(ROOT).parts) for folder in folders})
    assert tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"] == names
    assert all((folder / "__init__.py").read_text() == "" for folder in folders)


@pytest.mark.parametrize("module", MODULES)
def test_file_is_short_enough_to_be_read(module):
    assert len(MODULES[module].read_text().splitlines()) <= MOST_LINES


IMPORT_EVERYTHING = """
import importlib, json, locale, os, random, signal, sys, threading, warnings
outside, inside = json.loads(sys.argv[1])
for name in outside:  # what other packages do at import is theirs
    importlib.import_module(name)
import numpy, torch

def state():
    return {
        "environment": dict(os.environ), "filters": list(map(str, warnings.filters)), "path": list(sys.path),
        "random": random.getstate(), "numpy": str(numpy.random.get_state()), "torch": torch.get_rng_state().tolist(),
        "signals": [str(signal.getsignal(s)) for s in signal.valid_signals()], "threads": threading.active_count(),
        "torch threads": torch.get_num_threads(), "dtype": str(torch.get_default_dtype()),
        "matmul": torch.get_float32_matmul_precision(), "deterministic": torch.are_deterministic_algorithms_enabled(),
        "tf32": torch.backends.cudnn.allow_tf32, "locale": locale.setlocale(locale.LC_ALL), "folder": os.getcwd(),
        "group": torch.distributed.is_initialized(), "files": sorted(os.listdir()), "hook": str(sys.excepthook),
    }

before = state()
for name in inside:
    importlib.import_module(name)
    after = state()
    assert after == before, f"{name} changes " + ", ".join(key for key in before if before[key] != after[key])
assert not torch.cuda.is_initialized()
assert "matplotlib.pyplot" not in sys.modules
"""


def test_importing_does_nothing(tmp_path):
    graph = {module: imported_modules(module) for module in MODULES}
    for above, below in STAIRS:
        graph[above].discard(below)
    inside = [f"upsnb.{module}" for module in graphlib.TopologicalSorter(graph).static_order()]
    found = set().union(*(imports(path) for path in MODULES.values()))
    outside = set()
    apart = (
        "upsnb",
        "optuna",
        "mlflow",
        "wandb",
        "safetensors",
        "huggingface_hub",
        "torch.utils.tensorboard",
    )  # but for the first, not installed here
    for name in (name for name in found if not name.startswith(apart)):
        parent = name.rpartition(".")[0] or name
        top = ast.parse(f"import {parent}").body[0].names[0].name
        outside |= {name if _is_module(name) else top}
    arguments = json.dumps([sorted(outside), inside])
    done = subprocess.run(
        [sys.executable, "-c", IMPORT_EVERYTHING, arguments], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout == ""


def _is_module(name: str) -> bool:
    """Whether `a.b` in `from a import b` is a module, decided without importing it."""
    parts = name.split(".")
    try:
        folder = Path(metadata.distribution("torch").locate_file("")) / Path(*parts)
    except metadata.PackageNotFoundError:
        return False
    return len(parts) == 1 or folder.with_suffix(".py").exists() or (folder / "__init__.py").exists()


# -- params, documents, notebooks ----------------------------------------------------------------------------------


@pytest.mark.parametrize("path", PARAMS + OF_FAMILIES, ids=ids(PARAMS + OF_FAMILIES))
def test_params_file_is_valid_and_runs_here_or_says_why_not(path):
    config = overlays.load(path)
    try:
        hardware.check_runnable(config, hardware.detect())
    except ConfigError as error:
        assert all(isinstance(problem, Problem) and all(problem[:3]) for problem in error.problems), str(error)


@pytest.mark.parametrize("path", PARAMS, ids=ids(PARAMS))
def test_params_file_stands_alone_or_goes_on_top_as_the_documents_say(path):
    """Without `preset: ""` the notebook's own preset stays below a file, under papermill as well."""
    (row,) = re.findall(rf"^\|.*`params/{path.name}`.*\| (.*) \|$", (ROOT / "docs/runs.md").read_text(), re.MULTILINE)
    assert ("preset" in yaml.safe_load(path.read_text())) is not row.startswith("on top of")


def test_every_family_has_a_params_file_whose_model_fits_its_grid():
    assert [path.stem for path in OF_FAMILIES] == sorted(FAMILIES)
    for path in OF_FAMILIES:
        config = overlays.load(path)
        (outline,) = datasets.outlines(config, ROOT).values()
        assert outline.spec.family == path.stem and outline.spec.patch >= 2
        assert config.data.datasets[path.stem].augment == bool(FAMILIES[path.stem].symmetries)
        assert yaml.safe_load(path.read_text())["preset"] == ""


@pytest.mark.parametrize(("name", "last"), [("conservative", 6), ("aggressive", 8)])
def test_presets_have_the_phases_they_name_and_nothing_of_a_model(name, last):
    config = overlays.load(ROOT / "params" / f"{name}.yaml")
    assert [phase.number for phase in phases.PHASES if phases.is_on(phase, config)] == list(range(1, last + 1))
    assert {path.split(".")[0] for path in overlays.flatten(overlays.read(ROOT / "params" / f"{name}.yaml"))} <= {
        *("operator", "training", "optimizer", "guards", "logging")
    }


@pytest.mark.parametrize("path", DOCUMENTS, ids=ids(DOCUMENTS))
def test_every_path_in_a_document_exists(path):
    text = path.read_text()
    folders = r"\.ci|docs|notebooks|outputs/reference|params|tests|upsnb"
    named = set(re.findall(rf"(?<![\w/.<-])(?:{folders})/[\w./*-]*", text))
    linked = {link for link in re.findall(r"\]\(([^)#\s]+)", text) if "://" not in link and "@" not in link}
    for name in {name.rstrip(".") for name in named}:
        assert list(ROOT.glob(name.rstrip("/"))), f"{path.name} names {name}"
    for link in linked:
        assert (path.parent / link).exists(), f"{path.name} links to {link}"


def test_every_change_in_a_document_can_be_made():
    changes = re.findall(r"^```diff\n(.*?)^```$", (ROOT / "docs/extending.md").read_text(), re.DOTALL | re.MULTILINE)
    assert len(changes) == 5
    for change in changes:
        done = subprocess.run(["git", "apply", "--check"], input=change, cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr + change


def test_readme_says_what_every_room_and_notebook_is_for():
    text = (ROOT / "README.md").read_text()
    assert re.findall(r"^\| `upsnb/(\w+)/` \| \w", text, re.MULTILINE) == [room for room in ROOMS if room]
    assert all(f"| `notebooks/{path.name}` |" in text for path in NOTEBOOKS)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=ids(NOTEBOOKS))
def test_notebook_is_committed_without_outputs(path):
    for number, cell in enumerate(json.loads(path.read_text())["cells"]):
        if cell["cell_type"] != "code":
            continue
        if "keep_output" in cell["metadata"].get("tags", ()):
            assert cell["execution_count"] is not None, f"cell {number}: nbval needs the count of a kept output"
        else:
            assert not cell["outputs"], f"cell {number} has outputs -> nbstripout --keep-count {path.name}"


@pytest.mark.parametrize("path", NOTEBOOKS, ids=ids(NOTEBOOKS))
def test_notebook_ends_in_a_checked_summary(path):
    last = json.loads(path.read_text())["cells"][-1]
    assert {"keep_output", "nbval-check-output"} <= set(last["metadata"].get("tags", ()))
    (output,) = last["outputs"]
    values = ast.literal_eval("".join(output["data"]["text/plain"])).values()
    assert all(isinstance(value, (int, str, list)) for value in values), "a float is another one on another machine"


@pytest.mark.parametrize("path", NOTEBOOKS, ids=ids(NOTEBOOKS))
def test_notebook_starts_with_parameters_that_make_a_runnable_config(path):
    cells = [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]
    assert [cell["metadata"].get("tags") for cell in cells[:2]] == [["colab"], ["parameters"]]
    _, config = command.read_parameters(path, [], [])
    hardware.check_runnable(config, hardware.detect())


@pytest.mark.parametrize("path", NOTEBOOKS, ids=ids(NOTEBOOKS))
def test_notebook_shows_a_few_knobs_first_and_everything_else_below(path):
    """Each with its type and meaning, as `papermill --help-notebook` prints them, and with the preset's value."""
    tagged = {tag: c for c in json.loads(path.read_text())["cells"] for tag in c["metadata"].get("tags", ())}
    source = "".join(tagged["parameters"]["source"])
    knobs, below = (part.splitlines() for part in source.split("\n\n# Anything else\n"))
    assert 3 <= len(knobs) <= 5
    assert all(re.fullmatch(r"\w+: [\w\[\]]+ = .+  # .+", line) for line in knobs)
    assert {line.partition(":")[0] for line in below} >= {*RunConfig.model_fields, "run_folder"}
    _, config = command.read_parameters(path, [], [])
    unset = re.findall(r"^(\w+): \w+ = None .*None: the preset's \(\w+: (.+)\)$", source, re.MULTILINE)
    assert len(unset) == source.count(" = None ")
    for name, value in unset:
        (setting,) = overlays.flatten({name: None})
        assert phases.setting(config, setting) == yaml.safe_load(value), name


@pytest.mark.parametrize("path", PARAMS + OF_FAMILIES, ids=ids(PARAMS + OF_FAMILIES))
def test_training_notebook_takes_every_params_file(path):
    passed, config = command.read_parameters(ROOT / "notebooks/01_train.ipynb", [path], [])
    below = [] if "preset" in passed else [ROOT / "params/quick.yaml"]
    assert passed.keys() <= {*RunConfig.model_fields, *overlays.PARAMETERS} and config == overlays.load(*below, path)


def test_measured_tables_are_what_the_evidence_says():
    command = [sys.executable, str(ROOT / "benchmarks/readme.py"), "--check"]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
