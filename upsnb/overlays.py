"""Overlays: partial configs from params files, notebook parameters and the command line, put on top of each other.

An overlay may be nested (`training: {compile: true}`), dotted (`training.compile: true`) or flat (`compile: true`:
looked up in FLAT_ORDER, then wherever only one setting ends so). `null` takes a setting back to its default. A mapping
of named things, such as `data.datasets`, is replaced whole; a dotted path changes one entry of it.
"""

from __future__ import annotations

import copy
from pathlib import Path

import yaml

from upsnb import config as configs
from upsnb.config import RunConfig, nearest_setting, setting_paths
from upsnb.errors import ConfigError

FLAT_ORDER = ("training", "training.query_sampling", "operator.pdet", "operator", "optimizer", "latent")
NAMED = ("data.datasets", "training.loss_warmup_steps", "training.loss_frequency")  # mappings with names as keys


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
        elif path in sections:
            problems.append(f"{path}: got {value!r} -> it is a section, write its settings below it")
        else:
            problems.append(f"{path}: unknown setting -> {nearest_setting(path)}")

    def place(name: str, value) -> None:
        if name in known or name in sections or _inside_named(name):
            return visit(name, value)
        candidates = [path for path in (*known, *sections) if path.endswith("." + name)]
        first = [f"{section}.{name}" for section in FLAT_ORDER if f"{section}.{name}" in candidates]
        if first or len(candidates) == 1:
            visit((first or candidates)[0], value)
        elif candidates:
            problems.append(f"{name}: is ambiguous -> write one of {', '.join(sorted(candidates))}")
        else:
            problems.append(f"{name}: unknown setting -> {nearest_setting(name)}")

    for key, value in overlay.items():
        place(str(key), value)
    if problems:
        raise ConfigError(problems, where)
    return flat


def _inside_named(path: str) -> bool:
    return any(path.startswith(named + ".") for named in NAMED)


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
            if node.get(key) is None:  # `stages.<stage>.optimizer.lr` where the stage had no optimizer of its own
                node[key] = {}
            node = node[key]
            default = (default or {}).get(key)
        if flat[path] is not None:
            node[leaf] = copy.deepcopy(flat[path])
        elif default and leaf in default and not _inside_named(path):
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
