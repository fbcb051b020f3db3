"""A plain nn.Module as a Surrogate: one network for each dataset, given the tensors that it names."""

from __future__ import annotations

import inspect
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from upsnb.config import ModelConfig
from upsnb.data.spec import DatasetSpec
from upsnb.errors import ConfigError, DataError, Problem
from upsnb.models.geometry import grid_points
from upsnb.models.network import evaluating
from upsnb.models.surrogate import Surrogate

PASSED = ("parameters", "dt", "grid")  # to a forward that names them, beside the fields


class Wrapped(Surrogate):
    """Networks of a class that knows nothing of PDEs; statistics, the change of the last frame and rollout are here.

    A network may write `blocks()` and `smallest_grid()`.
    """

    def __init__(self, specs: dict[str, DatasetSpec], network: type[nn.Module], config: ModelConfig):
        super().__init__(specs)
        self.called, self.config = network.__name__, config
        named = inspect.signature(network.forward).parameters
        self.passed = tuple(name for name in PASSED if name in named)
        self.networks = nn.ModuleDict({name: construct(network, spec, config) for name, spec in specs.items()})
        self.noise_maps = nn.ModuleDict()  # of what a model that draws is given
        for name, spec in specs.items() if "grid" in self.passed else ():
            self._constant(f"{name}_grid", _places(spec.grid_shape))

    def state_dict(self, *arguments, **options):
        """Tensors only: neuraloperator's models put their own arguments beside them."""
        state = super().state_dict(*arguments, **options)
        state.pop("_metadata", None)
        return state

    def predict(self, name, x, parameters, relative_dt, points=None) -> Tensor:
        spec, grid, last = self.specs[name], tuple(x.shape[3:]), self.config.layout == "channels_last"
        z, known = x.flatten(1, 2), spec.num_parameters
        if parameters.shape[1] > known:  # not where another grid is only tried
            z = z + self.noise_maps[name](parameters[:, known:]).reshape(*z.shape[:2], *(1,) * len(grid))
            parameters = parameters[:, :known]
        if self.config.append_parameters:
            appended = (parameters, relative_dt[:, None]) if spec.time_dependent else (parameters,)
            channels = (value.reshape(x.shape[0], -1, *(1,) * len(grid)).expand(-1, -1, *grid) for value in appended)
            z = torch.cat((z, *channels), dim=1)
        given = {"parameters": parameters, "dt": relative_dt}
        if "grid" in self.passed:
            trained = grid == spec.grid_shape
            places = (self.constant(name, "grid") if trained else _places(grid, x.device)).expand(x.shape[0], -1, *grid)
            given["grid"] = places.movedim(1, -1) if last else places
        given = {key: given[key] for key in self.passed}
        change = self._frames(name, self.networks[name](z.movedim(1, -1) if last else z, **given), grid)
        return change + x[:, -1:, : spec.output_channels] if spec.time_dependent else change

    def _frames(self, name: str, y: Tensor, grid: tuple[int, ...]) -> Tensor:
        """What a network gave, as (B, T_out, C_out, *grid)."""
        spec = self.specs[name]
        if not isinstance(y, Tensor):
            raise DataError(f"{self.called}: its forward gave a {type(y).__name__} -> return one tensor")
        found, last = tuple(y.shape), self.config.layout == "channels_last"
        channels = spec.output_frames * spec.output_channels
        if y.dim() == len(grid) + 3:  # frames and channels apart
            y = y.flatten(-2) if last else y.flatten(1, 2)
        right = (*grid, channels) if last else (channels, *grid)
        if tuple(y.shape[1:]) != right:
            raise DataError(
                f"{self.called}: its forward gave {found} for {name} -> return (B, {', '.join(map(str, right))})"
            )
        return (y.movedim(-1, 1) if last else y).unflatten(1, (spec.output_frames, spec.output_channels))

    def smallest_grid(self, name: str) -> tuple[int, ...]:
        own = getattr(self.networks[name], "smallest_grid", None)
        return own() if inspect.ismethod(own) else super().smallest_grid(name)

    def refuses(self, name: str, grid: tuple[int, ...]) -> str:
        """Beside what the network says of itself: it is tried, because only its class knows what it can take."""
        spec = self.specs[name]
        if (said := super().refuses(name, grid)) or grid == spec.grid_shape:
            return said
        device = next(self.parameters()).device
        x = torch.zeros(1, spec.input_frames, spec.input_channels, *grid, device=device)
        try:
            with torch.no_grad(), evaluating(self):  # or batch norm would remember the trial
                self.predict(name, x, x.new_zeros(1, spec.num_parameters), x.new_ones(1))
        except (RuntimeError, ValueError, IndexError, AssertionError) as error:
            trained = " x ".join(map(str, spec.grid_shape))
            return f"{self.called} was built for {trained} and takes no other ({_first_line(error)})"
        return ""

    def blocks(self) -> list[nn.Module]:
        return [block for network in self.networks.values() for block in blocks_of(network)]

    def parts(self) -> dict[str, list[nn.Module]]:
        return {name: [each[name] for each in (self.networks, self.noise_maps) if name in each] for name in self.specs}

    def take_noise(self, count: int) -> bool:
        """What is drawn moves the given fields, each channel as a whole; how far is learned from zero on."""
        self.draws = count
        for name, spec in self.specs.items():
            self.noise_maps[name] = nn.Linear(count, spec.input_frames * spec.input_channels, bias=False)
            nn.init.zeros_(self.noise_maps[name].weight)
        return True

    def matrices(self) -> list[Tensor]:
        """Those of the blocks but for each network's first and last: what fields go in and out by is not hidden."""
        ends = set()
        for network in self.networks.values():
            wide = [parameter for parameter in network.parameters() if parameter.ndim >= 2]
            ends |= {*wide[:1], *wide[-1:]}
        return [matrix for matrix in super().matrices() if matrix not in ends]


def _places(grid: tuple[int, ...], device=None) -> Tensor:
    """Unit coordinates of a grid's cells as channels, (1, S, *grid)."""
    return grid_points(grid, device).T.reshape(1, -1, *grid)


def construct(network: type[nn.Module], spec: DatasetSpec, config: ModelConfig) -> nn.Module:
    """A network for a dataset, of what its constructor names and of `model.settings`.

    Raises:
        ConfigError: a setting that it does not take, one that is missing, or whatever the constructor says.
    """
    signature, settings = inspect.signature(network.__init__), config.settings
    appended = spec.num_parameters + spec.time_dependent if config.append_parameters else 0
    offered = {
        "in_channels": spec.input_frames * spec.input_channels + appended,
        "out_channels": spec.output_frames * spec.output_channels,
        "num_dims": spec.num_dims,
        "grid_shape": spec.grid_shape,
        "periodic": spec.periodic,
        "num_parameters": spec.num_parameters,
    }
    named = [name for name, parameter in signature.parameters.items() if parameter.kind is not parameter.VAR_KEYWORD]
    free = len(named) < len(signature.parameters)
    takes = ", ".join(name for name in named[1:] if name not in offered) or "nothing"
    unknown = [name for name in settings if name not in named and not free]
    if unknown:
        problems = [
            Problem(f"model.settings.{name}", f"{network.__name__} takes no such argument", f"it takes {takes}")
            for name in unknown
        ]
        raise ConfigError(problems, "the model")
    try:
        return network(**{name: value for name, value in offered.items() if name in named} | settings)
    except Exception as error:  # whatever a constructor raises
        found = f"{network.__name__} cannot be built for {spec.name} ({type(error).__name__}: {_first_line(error)})"
        raise ConfigError([Problem("model.settings", found, f"beside the data's shapes it takes {takes}")]) from error


def blocks_of(network: nn.Module) -> list[nn.Module]:
    """What a network says, else its longest ModuleList; else its Sequentials, or what stands in the only one."""
    if inspect.ismethod(getattr(network, "blocks", None)):
        return network.blocks()
    lists = [list(found) for found in network.modules() if isinstance(found, nn.ModuleList) and _called(found)]
    if lists:
        return _trained(max(lists, key=len))
    outer: list[nn.Sequential] = []
    for module in network.modules():
        if isinstance(module, nn.Sequential) and not any(module in set(found.modules()) for found in outer):
            outer.append(module)
    return _trained(outer[0] if len(outer) == 1 else outer)


def _called(modules: Iterable[nn.Module]) -> bool:
    """Whether modules can be called one by one: a list of lists cannot."""
    return all(type(module).forward is not nn.Module.forward for module in modules)


def _trained(modules: Iterable[nn.Module]) -> list[nn.Module]:
    return [module for module in modules if any(parameter.requires_grad for parameter in module.parameters())]


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:200]
