"""Kinds of values that settings have, each with its bounds; and the sections that others read as well."""

from __future__ import annotations

import re
import types
import typing
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field
from pydantic_core import PydanticCustomError

from upsnb.rules import TAKEN

OWN = "custom"  # the family of a user's own arrays
MOST = 2**31 - 1  # of any count
LARGEST = 1.0e9  # of any quantity: finite in float32 whatever it is multiplied with, and a time that clocks can wait
PositiveInt = Annotated[int, Field(gt=0, le=MOST)]
NonNegativeInt = Annotated[int, Field(ge=0, le=MOST)]
Seed = Annotated[int, Field(ge=0, lt=2**63)]
Quantity = Annotated[float, Field(ge=-LARGEST, le=LARGEST)]
PositiveFloat = Annotated[float, Field(gt=0.0, le=LARGEST)]
NonNegativeFloat = Annotated[float, Field(ge=0.0, le=LARGEST)]
Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
OpenFraction = Annotated[float, Field(ge=0.0, lt=1.0)]
PositiveFraction = Annotated[float, Field(gt=0.0, le=1.0)]


def _name_of_folder(text: str) -> str:
    if len(text) > 100 or not text.isprintable() or any(part[:1] in ("", ".") for part in text.split("/")):
        raise PydanticCustomError("name", "Write up to 100 characters on one line, below logging.root and not hidden")
    return text


def _name_of_dataset(text: str) -> str:
    if not re.fullmatch(r"[\w-]{1,64}", text, re.ASCII) or text in TAKEN:
        raise PydanticCustomError("name", "Name it with up to 64 letters, digits, _ and -, not as torch names its own")
    return text


def _path(text: str) -> str:
    if re.search(r"[\x00-\x1f\x7f]", text) or max(len(part.encode()) for part in text.split("/")) > 255:
        raise PydanticCustomError("path", "Write a path on one line, with names of at most 255 bytes")
    return text


FolderName = Annotated[str, AfterValidator(_name_of_folder)]
DatasetName = Annotated[str, AfterValidator(_name_of_dataset)]
PathText = Annotated[str, AfterValidator(_path), Field(max_length=1000)]
ChannelName = Annotated[str, Field(pattern=r"^[\w-]{1,40}$")]


class Section(BaseModel):
    """A frozen group of settings; unknown keys, wrong types and infinite numbers are errors."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


def section_of(annotation) -> type[Section] | None:
    """The Section behind a field's annotation (`X`, `X | None`), or None for a plain value."""
    is_union = typing.get_origin(annotation) in (typing.Union, types.UnionType)
    candidates = typing.get_args(annotation) if is_union else (annotation,)
    return next((one for one in candidates if isinstance(one, type) and issubclass(one, Section)), None)


class ArrayConfig(Section):
    """One array of a user's files."""

    axes: tuple[Literal["sample", "time", "x", "y", "z", "channel"], ...]  # as they lie in the file
    channels: tuple[ChannelName, ...]  # what it holds; several lie along its axis `channel`, in this order
    given: bool = False  # what the model sees and does not predict; without a time, and the same along axes it lacks


class CustomConfig(Section):
    """The row of a user's own arrays: where HDF5 or NumPy files hold what, and what is known of it."""

    title: str = "own data"  # for tables
    arrays: dict[PathText, ArrayConfig]  # by their path in a file; `*` in it: one for each sample
    periodic: tuple[bool, ...]  # of x, y, z; false: walls
    domain: tuple[tuple[Quantity, Quantity], ...] = ()  # ends of x, y, z; empty: 0 and 1
    coordinates: tuple[PathText, ...] = ()  # paths of the points in x, y, z; empty: centres of even cells
    times: PathText | None = None  # path of the saved times
    time_step: PositiveFloat | None = None  # between saved times, where no array holds them
    parameters: dict[ChannelName, PathText] = {}  # path of its values, one or one a sample; or path@attribute
    units: dict[ChannelName, str] = {}  # of channels, for figures
    symmetries: tuple[Literal["shift", "shift x", "sign", "turn"], ...] = ()  # images of a solution that are solutions
    vectors: tuple[tuple[ChannelName, ...], ...] = ()  # channels that turn with space: x, y, z component
    priors: tuple[Literal["conservation", "positivity"], ...] = ()  # what holds: means stay, values are not negative


class CostConfig(Section):
    """What the machine costs, and what the run may; all its time counts, start-up and pauses too."""

    price_per_hour: NonNegativeFloat = 0.0  # of the whole machine [$]; 0: nobody said
    budget: PositiveFloat | None = None  # [$]; once it is spent the run saves, evaluates and ends


class QuerySamplingConfig(Section):
    """At how many points the decoded field is compared with the truth."""

    num_queries: PositiveInt | None = None  # points per sample; empty: the whole grid
    jitter: OpenFraction = 0.0  # off-grid shift of query points, in cells


class MirrorConfig(Section):
    """A second place for checkpoints, such as a mounted drive, for machines that may be taken away."""

    folder: str = ""  # where it is, relative to the project; runs have folders of their names there; empty: nowhere
    budget_gb: PositiveFloat = 7.5  # disk space there for the checkpoints of one run [GB]


class EvaluationConfig(Section):
    """What is measured during and after training."""

    split: Literal["validation", "test"] = "test"  # the split of the final report
    every_epochs: PositiveInt = 1  # validation after so many epochs
    fraction: PositiveFraction = 1.0  # share of the validation split that is measured during training
    checkpoint: Literal["last", "best"] = "last"  # the weights reported on; best: on the validation split
    samples_per_call: PositiveInt = 32  # samples evaluated at a time; changes no metric
    rollout: bool = True  # roll trajectories out to their end
    symmetry_average: bool = False  # average the forecast over the square's eight symmetries
    num_examples: PositiveInt = 3  # predictions kept for the figures
    members: Annotated[int, Field(ge=2, le=100)] = 19  # forecasts of an ensemble, where the model draws them


class LoggingConfig(Section):
    """What a run writes down."""

    name: FolderName = "train"  # prefix of the run folder
    root: PathText = "outputs"  # where run folders go; relative to the project
