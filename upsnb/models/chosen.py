"""The model that a config chooses: `model.build` names a function or a class, in a module or in a file of its own.

The text of such a file goes into the config when a run is made of it (`with_source`), and so into config.yaml and every
checkpoint: workers, a resumed run, `load_model` and memory prediction never look for the file again. To load a run is
therefore to execute what its model's file said: load runs that you trust.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import linecache
import sys
import types
from collections.abc import Callable, Iterator
from hashlib import sha256
from pathlib import Path

import torch
from torch import nn

from upsnb import hardware, overlays
from upsnb.config import RunConfig
from upsnb.data.spec import DatasetSpec
from upsnb.errors import ConfigError, Problem
from upsnb.models.surrogate import Surrogate
from upsnb.models.wrapped import Wrapped
from upsnb.overlays import project_root

MOST_SOURCE = 2**15  # bytes; a saved config is a page of text, and a longer model is a package
TO_FILE = "write it into a file (%%writefile my_model.py) and set model.build: my_model.py:"


def with_source(config: RunConfig) -> RunConfig:
    """The config with the text of the file that `model.build` names, where it names one and has no text yet.

    Raises:
        ConfigError: the file cannot be read.
    """
    file = config.model.build.rpartition(":")[0]
    if config.model.source or not file.endswith(".py"):
        return config
    return overlays.apply(config, {"model.source": _read(file)})


def find(config: RunConfig) -> Callable[[RunConfig, dict[str, DatasetSpec]], Surrogate] | type[nn.Module]:
    """The function or the class that `model.build` names.

    Raises:
        ConfigError: there is none, or another process could not find it.
    """
    place, _, name = config.model.build.rpartition(":")
    if place.endswith(".py"):
        text = config.model.source or _read(place)
        module = _imported(config, lambda: _module(place, text))
    elif place == "__main__":
        raise _refused(config, "lives in this notebook, where no worker finds it", f"{TO_FILE}{name}")
    else:
        module = _imported(config, lambda: importlib.import_module(place))
        _check_reachable(config, module, name)
    if not hasattr(module, name):
        there = ", ".join(key for key, value in vars(module).items() if _is_network(value)) or "no nn.Module class"
        raise _refused(config, f"there is no {name!r} in {place}", f"it has {there}")
    return _checked(config, getattr(module, name))


@contextlib.contextmanager
def seeded(config: RunConfig) -> Iterator[None]:
    """Inside, weights are drawn by training.seed alone."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(config.training.seed)  # torch.manual_seed would reseed CUDA's as well
        yield


def build(config: RunConfig, specs: dict[str, DatasetSpec]) -> Surrogate:
    """The untrained model of a config; the same weights on every rank and in every process, by training.seed.

    Raises:
        ConfigError: `model.build` names nothing, or the model cannot be built of its settings.
    """
    if found := hardware.unbuildable(config):
        raise ConfigError(found, "the model")
    made = find(config)
    with seeded(config):
        model = Wrapped(specs, made, config.model) if inspect.isclass(made) else made(config, specs)
    if not isinstance(model, Surrogate):
        remedy = "return a Surrogate, or name the nn.Module class itself"
        raise _refused(config, f"returned a {type(model).__name__}", remedy)
    return model


def _refused(config: RunConfig, found: str, remedy: str) -> ConfigError:
    return ConfigError([Problem("model.build", f"{config.model.build}: {found}", remedy)], "the model")


def _read(file: str) -> str:
    """The text of a model's file, by its path from the working directory or from the project's folder."""
    places = [folder / file for folder in (Path.cwd(), project_root())]
    path = next((place for place in places if place.is_file()), None)
    if path is None:
        there = " or ".join(dict.fromkeys(str(place) for place in places))
        raise ConfigError([Problem("model.build", f"no file {there}", f"{TO_FILE}Name")], "the model")
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError([Problem("model.build", f"{path} cannot be read ({error})", "save it as UTF-8")]) from None
    if len(text.encode()) > MOST_SOURCE:
        found = f"{path} has more than {MOST_SOURCE // 1024} KiB, and its text stays with the run"
        raise ConfigError([Problem("model.build", found, "install it as a package and write package.module:Name")])
    return text


def _module(file: str, text: str) -> types.ModuleType:
    """A module of a file's text, the same one for the same text in all of a process."""
    name = f"{Path(file).stem}_{sha256(text.encode()).hexdigest()[:12]}"
    if name not in sys.modules:
        where = f"<{file} of the run>"
        linecache.cache[where] = (len(text), None, text.splitlines(True), where)  # for tracebacks: no file to look into
        sys.modules[name] = module = types.ModuleType(name)
        try:
            exec(compile(text, where, "exec"), vars(module))
        except BaseException:
            del sys.modules[name]
            raise
    return sys.modules[name]


def _imported(config: RunConfig, load: Callable[[], types.ModuleType]) -> types.ModuleType:
    try:
        return load()
    except Exception as error:  # whatever the code of a user's module raises
        said = f"cannot be imported ({type(error).__name__}: {error})"
        remedy = "write package.module:name or path/to/file.py:name; a file must not need others beside it"
        raise _refused(config, said, remedy) from error


def _check_reachable(config: RunConfig, module: types.ModuleType, name: str) -> None:
    """A module beside the notebook is found from there, and not by workers, which stand in the project's folder."""
    beside = Path.cwd() / f"{module.__name__}.py"
    if getattr(module, "__file__", None) == str(beside) and Path.cwd() != project_root():
        raise _refused(config, "is found from this folder alone", f"set model.build: {beside.name}:{name}")


def _is_network(value) -> bool:
    return inspect.isclass(value) and issubclass(value, nn.Module) and not value.__module__.startswith("torch.")


def _checked(config: RunConfig, found):
    if isinstance(found, nn.Module):
        remedy = f"name its class, {type(found).__name__}, which is constructed for each dataset"
        raise _refused(config, "is one network, already built", remedy)
    if getattr(found, "__name__", "") == "<lambda>":
        raise _refused(config, "is a lambda", "write a class, or a def of (config, specs)")
    if not callable(found) or (inspect.isclass(found) and not issubclass(found, nn.Module)):
        remedy = "name an nn.Module class or a function of (config, specs)"
        raise _refused(config, f"is a {type(found).__name__}", remedy)
    if inspect.isclass(found) and issubclass(found, Surrogate):
        raise _refused(config, "is a Surrogate class", "name a function of (config, specs) that returns one")
    return found
