"""Overlays: partial configs from params files, notebook parameters and the command line, put on top of each other.

An overlay may be nested (`training: {compile: true}`), dotted (`training.compile: true`) or flat (`compile: true`:
looked up in FLAT_ORDER, then wherever only one setting ends so). `null` empties a setting that may be empty (a
`grad_clip` of null is no clipping) and takes any other back to its default. A mapping of named things, such as
`data.datasets`, is replaced whole; a dotted path changes one entry of it.
"""

from __future__ import annotations

import ast
import contextlib
import copy
import functools
import re
import typing
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from pydantic import PydanticUserError, TypeAdapter, ValidationError

from upsnb import config as configs
from upsnb import plain_yaml
from upsnb.config import RunConfig, declared, nearest_setting
from upsnb.errors import MOST_LISTED, MOST_SHOWN, ConfigError, Problem, shown
from upsnb.rules import did_you_mean
from upsnb.values import section_of

FLAT_ORDER = ("training", "training.query_sampling", "operator.pdet", "operator", "optimizer", "latent", "checkpoint")
NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)[eE][+-]?\d+")  # what YAML takes for text when dot or sign is missing
PARAMETERS = ("preset", "run_folder")  # what a notebook's parameters cell defines beside one overlay per section
CALLED = {"str": "a text", "bool": "true or false", "int": "a whole number", "float": "a number"}  # types, in words
NAMED = [path for path, kind in declared().items() if typing.get_origin(kind) is dict]  # names are their keys


def read(path: Path) -> dict:
    """One params file as plain data, its keys unchecked."""
    return read_file(path)[0]


def read_file(path: Path) -> tuple[dict, bool]:
    """One params file as plain data, its keys unchecked; and whether it stands alone: `preset: ""`, nothing below it.

    That is papermill's own way to say so: without it, a notebook's preset stays below the file.
    """
    path = Path(path)
    try:
        if not path.is_file():
            near = sorted(p.name for p in path.parent.glob("*.yaml")) if path.parent.is_dir() else []
            hint = did_you_mean(path.name, near) if near else "has no params files"
            raise ConfigError([f"no such file -> {as_typed(path.parent)}: {hint}"], str(path))
        with open(path, "rb") as file:
            values = plain_yaml.mapping(file.read(plain_yaml.MOST_BYTES + 1), str(path))
    except OSError as error:
        raise ConfigError([f"cannot be read ({error.strerror}) -> check name and permissions"], str(path)) from None
    preset = values.pop("preset", None)
    if preset:
        remedy = f'choose it with -p preset={shown(preset)}, or write "" to have no preset below this file'
        raise ConfigError([f"preset: a file cannot name another one -> {remedy}"], str(path))
    return values, preset == ""


def flatten(overlay: dict, where: str = "the overlay") -> dict:
    """Any written form of an overlay as one mapping from full dotted paths to values.

    Raises:
        ConfigError: every key that names no setting, or more than one.
    """
    found, problems = _placed(overlay.items())
    if problems:
        raise ConfigError(problems, where)
    return {path: value for _, flat in found for path, value in flat.items()}


def _placed(overlay: Iterable[tuple]) -> tuple[list[tuple[str, dict]], list[Problem]]:
    """For each key of an overlay, in any written form, the settings that it stands for; and what is wrong with any."""
    known, sections = _known()
    found, problems, flat = [], [], {}

    def visit(path: str, value) -> None:
        if path in known or _inside_named(path):
            flat[path] = value
        elif path in sections and isinstance(value, dict):
            for key, inner in value.items():
                visit(f"{path}.{key}", inner)
        elif path in sections and value is None and may_be_empty(path):
            flat[path] = None
        elif path in sections:
            problems.append(Problem(path, f"got {shown(value)}", "it is a section, write its settings below it"))
        else:
            unknown(path)

    def unknown(name: str) -> None:  # looking for what was meant takes a millisecond
        hint = nearest_setting(name) if len(problems) < MOST_LISTED else "take it out"
        problems.append(Problem(name, "unknown setting", hint))

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
            unknown(name)

    for key, value in overlay:
        flat = {}  # that `visit` fills
        place(str(key), value)
        found.append((key, flat))
    return found, problems


@functools.cache
def _known() -> tuple[frozenset[str], frozenset[str]]:
    """Dotted paths of all settings, and of all sections."""
    kinds = {path: kind for path, kind in declared().items() if "*" not in path}
    sections = frozenset(path for path, kind in kinds.items() if section_of(kind))
    return frozenset(kinds) - sections, sections


def is_setting(name: str) -> bool:
    """Whether a name, in any written form, is one setting or section."""
    try:
        flatten({name: {}})
    except ConfigError:
        return False
    return True


def _inside_named(path: str) -> bool:
    return any(path.startswith(named + ".") for named in NAMED)


def may_be_empty(path: str) -> bool:
    """Whether None is a value of this setting, rather than the wish for its default."""
    return type(None) in typing.get_args(declared().get(path))


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
            if isinstance(node, dict) and node.get(key) is None and (flat[path] is not None or _inside_named(path)):
                node[key] = {}  # `stages.operator.optimizer.lr`: it had none so far
            node, default = (part.get(key) if isinstance(part, dict) else None for part in (node, default))
        if node is None and flat[path] is None:
            continue  # nor has it one now, which would stand in place of the top-level one
        if not isinstance(node, dict):
            found = f"{'.'.join(parents)} holds a single value"
            raise ConfigError([Problem(path, found, "nothing can be below it")], where)
        if flat[path] is not None or may_be_empty(path):
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


class Layers:
    """Overlays on top of each other, the lowest first; what is wrong is told with the one that brought it."""

    def __init__(self, where: str):
        self.where, self.problems = where, []
        self.layers: list[tuple[Path | str, dict]] = []  # what said so, a file or in words; its settings, flattened

    def read(self, path: Path) -> tuple[dict, bool]:
        """As `read_file`; of a file that cannot be read, nothing and a problem."""
        try:
            return read_file(path)
        except ConfigError as error:
            self.problems += [f"{as_typed(path)}: {problem}" for problem in error.problems]
            return {}, False

    def put(self, overlay: dict, source: Path | str = "", unset: Collection[str] = ()) -> None:
        """An overlay, in any written form, on top of the others.

        Args:
            unset: its keys that must be settings, and are left as they are below.
        """
        found, problems = _placed(pieces(overlay))
        self.problems += [_with_source(problem, source) for problem in problems[:MOST_LISTED]] + problems[MOST_LISTED:]
        self.layers.append((source, functools.reduce(stack, (flat for key, flat in found if key not in unset), {})))

    def flat(self, count: int | None = None) -> dict:
        """All of them, or the lowest so many, as one flattened overlay."""
        return functools.reduce(stack, (flat for _, flat in self.layers[:count]), {})

    def config(self, check: Callable[[RunConfig], list[Problem]] | None = None) -> RunConfig:
        """What they make of the defaults.

        Args:
            check: what else, such as this machine, stands against a valid config.
        Raises:
            ConfigError: every problem at once.
        """
        self.check = check
        config, problems = self._applied(None)
        self.problems += [*map(self._traced, problems[:MOST_LISTED]), *problems[MOST_LISTED:]]
        if self.problems:
            raise ConfigError(self.problems, self.where)
        return config

    def _applied(self, count: int | None) -> tuple[RunConfig | None, list[Problem | str]]:
        try:
            config = apply(RunConfig(), self.flat(count), self.where)
        except ConfigError as error:
            return None, error.problems
        return config, self.check(config) if self.check else []

    def _traced(self, problem: Problem | str) -> Problem | str:
        """With the layer since which it is there; of a contradiction, that is the last one that took part in it."""
        number = len(self.layers) - 1
        while number >= 0 and problem in self._applied(number)[1]:
            number -= 1
        return _with_source(problem, self.layers[number][0]) if number >= 0 else problem  # as it comes, on this machine


def _with_source(problem: Problem | str, source: Path | str) -> Problem | str:
    if isinstance(problem, str):
        return f"{source}: {problem}" if source else problem
    if isinstance(source, Path):
        line = _line(source, problem.setting)
        source = as_typed(source) + (f":{line}" if line else "")
    return problem._replace(source=source)


def _line(path: Path, setting: str) -> int | None:
    """Where a params file sets something, or the nearest section above it; None where it says nothing of it."""
    lines = plain_yaml.lines(path.read_bytes())
    fits = [name for name in lines if f"{setting}.".startswith(f"{name}.") or setting.endswith(f".{name}")]
    return lines[max(fits, key=lambda name: (setting.endswith(name), len(name)))] if fits else None


def as_typed(path: Path | str) -> str:
    """A path as one would type it here."""
    path = Path(path).absolute()
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)


def load(*paths: Path, overrides: dict | None = None) -> RunConfig:
    """RunConfig from params files, in order, and overrides on top."""
    layers = Layers(" + ".join(str(p) for p in paths) or "the overrides")
    for path in map(Path, paths):
        layers.put(layers.read(path)[0], path)
    layers.put(overrides or {}, "the overrides" if paths else "")
    return layers.config()


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


def from_notebook(variables: dict, own: Collection[str] = ()) -> RunConfig:
    """RunConfig from what a notebook's parameters cell, and papermill below it, defined; arguments as of `of_notebook`.

    Raises:
        ConfigError: every unknown name, wrong type and contradiction at once.
    """
    return of_notebook(variables, own).config()


def of_notebook(variables: dict, own: Collection[str], injected: Collection[str] | None = None) -> Layers:
    """The layers of a notebook: its preset, its parameters cell, and what papermill injected.

    papermill injects whatever it is given and only logs what the notebook does not know, so every variable that holds
    plain data counts as a setting: a misspelt one is an error here, a flat one (`use_fsdp2: false`) takes effect. What
    was injected goes over the cell, flat names over sections. A flat name that the cell leaves at None is not set.

    Args:
        variables: the notebook's `globals()`, right after its parameters.
        own: parameters of the notebook itself that are no settings of a run.
        injected: names that papermill gave a value; None: as the notebook's history says.
    """
    layers = Layers("the notebook's parameters")
    layers.problems += of_other_types(variables, variables.get("__annotations__", {}), (*PARAMETERS, *own))
    plain = (str, int, float, list, tuple, dict, type(None))
    passed_over = {*PARAMETERS, *own, "In", "Out", "exit", "quit", "get_ipython", "open"}
    if variables.get("preset"):
        path = params_path(str(variables["preset"]))
        layers.put(layers.read(path)[0], path)
    names = list(variables)
    if injected is None:
        cell, injected = _parameter_names(variables)
        names = [*cell, *injected] or [name for name in variables if not name.startswith("_")]
    taken = {
        name: variables[name]
        for name in sorted(dict.fromkeys(names), key=lambda name: name not in RunConfig.model_fields)
        if name in variables and name not in passed_over and isinstance(variables[name], plain)
    }
    in_cell = {name: value for name, value in taken.items() if name not in injected}
    layers.put(in_cell, unset=[name for name, value in in_cell.items() if value is None])
    layers.put({name: value for name, value in taken.items() if name in injected}, "given to papermill")
    return layers


def of_other_types(values: Mapping, kinds: Mapping, names: Collection[str]) -> Iterator[str]:
    """Parameters of a notebook itself that are not of the type its cell says: papermill's text 'false' is true.

    Args:
        kinds: of names, types or their texts.
    """
    for name in names:
        kind, value = kinds.get(name), values.get(name)
        if kind is None or value is None:
            continue
        said = kind.__name__ if type(kind) is type else str(kind)
        with contextlib.suppress(PydanticUserError):  # a type that is known to the notebook alone
            try:
                TypeAdapter(kind).validate_python(value, strict=True)
            except ValidationError:
                yield f"{name}: got {shown(value)} -> write {CALLED.get(said, said)}"


def pieces(overlay: dict) -> list[tuple[str, object]]:
    """Settings one by one where sections are nested: a misspelt key must not hide a wrong value beside it."""
    found = []
    for key, value in overlay.items():
        nested = key in RunConfig.model_fields and isinstance(value, dict)
        found += [(f"{key}.{name}", inner) for name, inner in value.items()] if nested else [(key, value)]
    return found


def settings_of(params: Sequence[str], problems: list) -> list[tuple[str, dict]]:
    """What each `-p key=value` of a command line sets, under its own words; what is wrong goes to `problems`."""
    found = []
    for param in params:
        key, separator, text = param.partition("=")
        source = f"-p {param if param.isprintable() and len(param) <= MOST_SHOWN else shown(param)}"
        if not separator:
            problems.append(f"{source}: has no value -> write -p key=value")
            continue
        try:
            found.append((source, {key.strip(): _numbers(plain_yaml.parse(text, "-p"))}))
        except ConfigError as error:
            problems += [f"{source}: {problem}, or quote it" for problem in error.problems]
    return found


def _numbers(value):
    """The same data with texts such as 1e-4, which YAML wants written 1.0e-4, as numbers."""
    if isinstance(value, dict):
        return {key: _numbers(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_numbers(inner) for inner in value]
    return float(value) if isinstance(value, str) and NUMBER.fullmatch(value) else value


def project_root() -> Path:
    """The folder that holds `params/` and `notebooks/`: above the working directory, else above the package."""
    here, package = Path.cwd(), Path(__file__).resolve().parents[1]
    for folder in (here, *here.parents, package):
        if (folder / "params").is_dir() and (folder / "notebooks").is_dir():
            return folder
    return here


def params_path(given: str) -> Path:
    """A params file: a path, or a name in params/; from this folder, one above it, or this project's."""
    name = given if given.endswith((".yaml", ".yml")) else given + ".yaml"
    here = Path.cwd()
    folders = [folder / "params" for folder in (here, *here.parents, Path(__file__).resolve().parents[1])]
    folders = [folder for folder in folders if folder.is_dir()]
    below = [Path(given), Path(name)]
    below += [*(folder.parent / name for folder in folders), *(folder / name for folder in folders)]
    found = [path for path in below if path.is_file()] or [path for path in reversed(below) if path.parent.is_dir()]
    return (found or below)[0]


def assignments(source: str) -> dict[str, ast.expr | None]:
    """Names that a cell assigns at its top level, in order, and the expression each was given last."""
    found: dict[str, ast.expr | None] = {}
    for node in ast.parse(source).body:
        if isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = getattr(node, "targets", None) or [node.target]
            found |= {target.id: node.value for target in targets if isinstance(target, ast.Name)}
    return found


def annotations(source: str) -> dict[str, str]:
    """Types that a cell gives the names it assigns at its top level, as texts."""
    typed = [node for node in ast.parse(source).body if isinstance(node, ast.AnnAssign)]
    return {ast.unparse(node.target): ast.unparse(node.annotation) for node in typed}


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
