"""Overlays: partial configs from params files, notebook parameters and the command line, put on top of each other.

An overlay may be nested (`training: {compile: true}`), dotted (`training.compile: true`) or flat (`compile: true`:
looked up in FLAT_ORDER, then wherever only one setting ends so). `null` empties a setting that may be empty (a
`grad_clip` of null is no clipping) and takes any other back to its default. A mapping of named things, such as
`data.datasets`, is replaced whole; a dotted path changes one entry of it.
"""

from __future__ import annotations

import ast
import copy
import typing
from collections.abc import Collection
from pathlib import Path

import yaml

from upsnb import config as configs
from upsnb.config import RunConfig, nearest_setting, setting_paths
from upsnb.errors import ConfigError, Problem

FLAT_ORDER = ("training", "training.query_sampling", "operator.pdet", "operator", "optimizer", "latent")
PARAMETERS = ("preset", "run_folder")  # what a notebook's parameters cell defines beside one overlay per section
# mappings with names as keys
NAMED = ("data.datasets", "model.settings", "training.loss_warmup_steps", "training.loss_frequency")


def read(path: Path) -> dict:
    """One params file as plain data, its keys unchecked."""
    path = Path(path)
    if not path.is_file():
        near = sorted(p.name for p in path.parent.glob("*.yaml")) if path.parent.is_dir() else []
        raise ConfigError([f"no such file -> {path.parent} has {', '.join(near) or 'no params files'}"], str(path))
    try:
        values = yaml.safe_load(path.read_text())
    except yaml.YAMLError as error:
        raise ConfigError([f"not YAML: {' '.join(str(error).split())}"], str(path)) from None
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise ConfigError([f"got {type(values).__name__} at the top -> write `section:` and its settings"], str(path))
    # `preset: ""` in a file is for papermill, which would otherwise leave the notebook's own preset below the file.
    if values.pop("preset", ""):
        raise ConfigError(['preset: a params file stands alone -> write preset: "" or leave it out'], str(path))
    return values


def flatten(overlay: dict, where: str = "the overlay") -> dict:
    """Any written form of an overlay as one mapping from full dotted paths to values.

    Raises:
        ConfigError: every key that names no setting, or more than one.
    """
    known = [path for path in setting_paths() if "*" not in path]
    sections = {path.rpartition(".")[0] for path in known} | {path.split(".")[0] for path in known}
    flat, problems = {}, []

    def visit(path: str, value) -> None:
        if path in known or _inside_named(path):
            flat[path] = value
        elif path in sections and isinstance(value, dict):
            for key, inner in value.items():
                visit(f"{path}.{key}", inner)
        elif path in sections and value is None and _may_be_empty(path):
            flat[path] = None
        elif path in sections:
            problems.append(Problem(path, f"got {value!r}", "it is a section, write its settings below it"))
        else:
            problems.append(Problem(path, "unknown setting", nearest_setting(path)))

    def place(name: str, value) -> None:
        if name in known or name in sections or _inside_named(name):
            return visit(name, value)
        candidates = [path for path in (*known, *sections) if path.endswith("." + name)]
        first = [f"{section}.{name}" for section in FLAT_ORDER if f"{section}.{name}" in candidates]
        if first or len(candidates) == 1:
            visit((first or candidates)[0], value)
        elif candidates:
            problems.append(Problem(name, "is ambiguous", f"write one of {', '.join(sorted(candidates))}"))
        else:
            problems.append(Problem(name, "unknown setting", nearest_setting(name)))

    for key, value in overlay.items():
        place(str(key), value)
    if problems:
        raise ConfigError(problems, where)
    return flat


def is_setting(name: str) -> bool:
    """Whether a name, in any written form, is one setting or section."""
    try:
        flatten({name: {}})
    except ConfigError:
        return False
    return True


def _inside_named(path: str) -> bool:
    return any(path.startswith(named + ".") for named in NAMED)


def _may_be_empty(path: str) -> bool:
    """Whether None is a value of this setting, rather than the wish for its default."""
    section, annotation = RunConfig, None
    for name in path.split("."):
        if section is None or name not in section.model_fields:  # inside a mapping of named things
            return False
        annotation = section.model_fields[name].annotation
        section = configs._fields_of(annotation)
    return type(None) in typing.get_args(annotation)


def apply(base: RunConfig, flat: dict, where: str = "the overlay") -> RunConfig:
    """`base` with the settings of a flattened overlay changed.

    Raises:
        ConfigError: the result is not a valid config.
    """
    values = base.model_dump(mode="json")
    defaults = RunConfig().model_dump(mode="json")
    for path in sorted(flat, key=lambda p: p.count(".")):  # a whole mapping first, then entries of it
        *parents, leaf = path.split(".")
        node, default = values, defaults
        for key in parents:
            if isinstance(node, dict) and node.get(key) is None:  # `stages.operator.optimizer.lr`: it had none so far
                node[key] = {}
            node, default = (part.get(key) if isinstance(part, dict) else None for part in (node, default))
        if not isinstance(node, dict):
            found = f"{'.'.join(parents)} holds a single value"
            raise ConfigError([Problem(path, found, "nothing can be below it")], where)
        if flat[path] is not None or _may_be_empty(path):
            node[leaf] = copy.deepcopy(flat[path])
        elif isinstance(default, dict) and leaf in default and not _inside_named(path):
            node[leaf] = default[leaf]
        else:
            node.pop(leaf, None)  # an entry of a named mapping goes, and with it all it said
    return configs.validate(values, where)


def resolve(*overlays: dict, base: RunConfig | None = None, where: str = "the configuration") -> RunConfig:
    """Put overlays on top of the defaults, later ones over earlier ones."""
    flat: dict = {}
    for overlay in overlays:
        flat = stack(flat, flatten(overlay, where))
    return apply(base or RunConfig(), flat, where)


def stack(lower: dict, upper: dict) -> dict:
    """Two flattened overlays as one; a whole mapping above hides entries of it below."""
    kept = {path: value for path, value in lower.items() if not any(path.startswith(f"{top}.") for top in upper)}
    return {**kept, **upper}


def load(*paths: Path, overrides: dict | None = None) -> RunConfig:
    """RunConfig from params files, in order, and overrides on top."""
    where = " + ".join(str(p) for p in paths) or "the overrides"
    return resolve(*(read(p) for p in paths), overrides or {}, where=where)


def difference(old: RunConfig, new: RunConfig) -> dict:
    """The flattened overlay that leads from `old` to `new`, values as plain data."""
    changes: dict = {}

    def visit(a, b, path: str) -> None:
        if isinstance(a, dict) and isinstance(b, dict) and path not in NAMED:
            for key in a.keys() | b.keys():
                visit(a.get(key), b.get(key), f"{path}.{key}" if path else key)
        elif a != b:
            changes[path] = b

    visit(old.model_dump(mode="json"), new.model_dump(mode="json"), "")
    return dict(sorted(changes.items()))


def from_notebook(variables: dict, own: Collection[str] = (), injected: Collection[str] | None = None) -> RunConfig:
    """RunConfig from what a notebook's parameters cell, and papermill below it, defined.

    papermill injects whatever it is given and only logs what the notebook does not know, so every variable that holds
    plain data counts as a setting: a misspelt one is an error here, a flat one (`use_fsdp2: false`) takes effect. What
    was injected goes over the cell, flat names over sections. A flat name that the cell leaves at None is not set.

    Args:
        variables: the notebook's `globals()`, right after its parameters.
        own: parameters of the notebook itself that are no settings of a run.
        injected: names that papermill gave a value; None: as the notebook's history says.
    Raises:
        ConfigError: every unknown name, wrong type and contradiction at once.
    """
    where = "the notebook's parameters"
    plain = (str, int, float, list, tuple, dict, type(None))
    passed_over = {*PARAMETERS, *own, "In", "Out", "exit", "quit", "get_ipython", "open"}
    flat, problems = {}, []

    def collect(overlay: dict, inside: str, unset: bool = False) -> None:
        nonlocal flat
        try:
            found = flatten(overlay, inside)
        except ConfigError as error:
            problems.extend(error.problems)
        else:
            flat = flat if unset else stack(flat, found)

    if variables.get("preset"):
        collect(read(_preset_path(str(variables["preset"]))), "the preset")
    names = list(variables)
    if injected is None:
        cell, injected = _parameter_names(variables)
        names = [*cell, *injected] or [name for name in variables if not name.startswith("_")]
    for name in sorted(dict.fromkeys(names), key=lambda name: (name in injected, name not in RunConfig.model_fields)):
        value = variables.get(name)
        if name in passed_over or not isinstance(value, plain):
            continue
        for key, inner in pieces({name: value}):
            collect({key: inner}, where, unset=value is None and name not in injected)
    try:
        config = apply(RunConfig(), flat, where)
    except ConfigError as error:
        problems += error.problems
    if problems:
        raise ConfigError(problems, where)
    return config


def pieces(overlay: dict) -> list[tuple[str, object]]:
    """Settings one by one where sections are nested: a misspelt key must not hide a wrong value beside it."""
    found = []
    for key, value in overlay.items():
        nested = key in RunConfig.model_fields and isinstance(value, dict)
        found += [(f"{key}.{name}", inner) for name, inner in value.items()] if nested else [(key, value)]
    return found


def _preset_path(preset: str) -> Path:
    """A preset's file: a path, or a name in params/ of this folder, one above it, or this project."""
    name = preset if preset.endswith((".yaml", ".yml")) else preset + ".yaml"
    here = Path.cwd()
    folders = [folder / "params" for folder in (here, *here.parents, Path(__file__).resolve().parents[1])]
    candidates = [Path(name), *(folder / name for folder in folders if folder.is_dir())]
    return next((path for path in candidates if path.is_file()), candidates[-1])


def assignments(source: str) -> dict[str, ast.expr | None]:
    """Names that a cell assigns at its top level, in order, and the expression each was given last."""
    found: dict[str, ast.expr | None] = {}
    for node in ast.parse(source).body:
        if isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = getattr(node, "targets", None) or [node.target]
            found |= {target.id: node.value for target in targets if isinstance(target, ast.Name)}
    return found


def _parameter_names(variables: dict) -> tuple[list[str], list[str]]:
    """Names assigned in the latest parameters cell, and in the one papermill injected; none if history does not tell.

    Without it, running the parameters again would take every variable of the cells below for a setting.
    """
    cell: list[str] = []
    injected: list[str] = []
    for source in variables.get("In") or ():
        try:
            assigned = list(assignments(source))
        except SyntaxError:  # a cell with IPython magics is no parameters cell
            continue
        if source.startswith("# Parameters"):  # papermill's
            injected += assigned
        elif "preset" in assigned:
            cell, injected = assigned, []
    return cell, injected
