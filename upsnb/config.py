"""The one description of a run: typed, frozen, validated. A RunConfig that exists is a valid one.

Every field is written `name: type = default  # meaning [unit]`; the keys of a params file are these sections.
"""

from __future__ import annotations

import difflib
import functools
import json
import re
import typing
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import Field, ValidationError, field_validator, model_validator
from pydantic_core import PydanticCustomError

from upsnb import plain_yaml
from upsnb.errors import ConfigError, Problem, shown
from upsnb.rules import contradictions
from upsnb.values import (
    OWN,
    CostConfig,
    CustomConfig,
    DatasetName,
    EvaluationConfig,
    Fraction,
    LoggingConfig,
    MirrorConfig,
    NonNegativeFloat,
    NonNegativeInt,
    OpenFraction,
    PathText,
    PositiveFloat,
    PositiveInt,
    Quantity,
    QuerySamplingConfig,
    Section,
    Seed,
    section_of,
)

FORMAT = 1  # version of the saved config.yaml
OPERATOR = "operator"  # the first stage


class GenerateConfig(Section):
    """Data made here, in PDEBench's own file layout, when no files are named."""

    num_samples: PositiveInt = 128  # trajectories or coefficient fields
    resolution: PositiveInt | None = None  # grid points per axis; empty: as the family's row says, docs/data.md
    num_times: PositiveInt | None = None  # saved times (ignored where the problem is static); empty: the row's
    until: PositiveFloat | None = None  # the last saved time (likewise); empty: the row's
    parameter: Quantity | None = None  # the equation's parameter where it has one, like advection's speed beta
    parameters: dict[str, Quantity] = {}  # several by name; those left out are the row's
    seed: Seed = 0  # seed of the generator, apart from training.seed


class DatasetConfig(Section):
    """One dataset: a PDEBench family or one's own, its files, and how it is read."""

    family: str  # which equation: a row of data.families, with its reader and its physics; or custom
    custom: CustomConfig | None = None  # the row of family custom
    files: tuple[PathText, ...] = ()  # file names or globs under data.root; empty: generate
    generate: GenerateConfig = GenerateConfig()  # used only when files is empty
    reduced_resolution: PositiveInt = 1  # keep every k-th grid point (PDEBench's reduction)
    reduced_resolution_t: PositiveInt = 1  # keep every k-th saved time
    num_samples: PositiveInt | None = None  # read at most this many samples of each file
    input_frames: PositiveInt = 1  # frames the model sees in one call
    output_frames: PositiveInt = 1  # frames the model predicts in one call
    tokens: PositiveInt | None = None  # budget of latent tokens for this dataset; empty: latent.tokens
    augment: bool = False  # the equation's own symmetries, at random, in training

    @field_validator("family")
    @classmethod
    def _is_known(cls, name: str) -> str:
        from upsnb.data.families import FAMILIES  # here, because the table stands a floor above

        if name not in (*FAMILIES, OWN):
            known = " or ".join(map(repr, (*FAMILIES, OWN)))
            raise PydanticCustomError("literal_error", "no such family", {"expected": known})
        return name


class SplitConfig(Section):
    """Which samples are trained on, selected on and reported on."""

    convention: Literal["pdebench", "first", "last", "distinct"] = "pdebench"  # where the test block lies: docs/data.md
    validation_fraction: OpenFraction = 0.1  # share of samples for model selection
    test_fraction: OpenFraction = 0.1  # share of samples that is only reported on


class MixingConfig(Section):
    """How often each dataset is trained on; changed within an epoch, the rest of it is as if it had begun so."""

    by: Literal["uniform", "size", "loss"] = "uniform"  # equal turns, training pairs, or nRMSE of the last validation
    from_epoch: dict[DatasetName, NonNegativeInt] = {}  # curriculum: a dataset joins in this epoch of a stage


class DataConfig(Section):
    """Where the fields come from and where they live during training."""

    workload: str = "upsnb.training.fields:Fields"  # what is trained: module:Class or file.py:Class (docs/extending.md)
    workload_settings: dict[str, Any] = {}  # of a workload that is not fields, which brings its own datasets
    root: PathText = "data"  # folder of the PDEBench files; relative to the project
    datasets: dict[DatasetName, DatasetConfig] = {
        "advection": DatasetConfig(
            family="advection1d",
            generate=GenerateConfig(num_samples=200, resolution=256, parameter=0.4),
            input_frames=4,
            output_frames=4,
            augment=True,
        ),
        "darcy": DatasetConfig(family="darcy2d", generate=GenerateConfig(num_samples=256), augment=True),
    }
    mixing: MixingConfig = MixingConfig()
    split: SplitConfig = SplitConfig()
    download: Literal["never", "missing"] = "never"  # missing: published files that are named and not there
    residency: Literal["auto", "device", "workers"] = "auto"  # on the device, or read from HDF5 by workers
    max_resident_gib: PositiveFloat = 4.0  # auto: largest dataset kept on the device [GiB]


class LatentConfig(Section):
    """The latent state between encoder, operator and decoder."""

    dim: PositiveInt = 128  # width of a latent token
    tokens: PositiveInt = 128  # budget of tokens a field is compressed into


class PdetConfig(Section):
    """The operator: a pre-norm transformer over latent tokens."""

    input_dim: PositiveInt | None = None  # latent.dim, if given it must agree
    hidden_dim: PositiveInt = 384  # width of the residual stream
    depth: PositiveInt = 12  # number of blocks
    num_heads: PositiveInt = 8  # attention heads
    qk_norm: bool = True  # RMS-normalise queries and keys
    mlp_ratio: PositiveFloat = 4.0  # hidden width of the MLP over hidden_dim
    drop_path: OpenFraction = 0.0  # probability of skipping a block, rising linearly with depth
    use_activation_checkpoint: bool = False  # recompute block activations in backward
    checkpoint_every: PositiveInt = 1  # every k-th block, where use_activation_checkpoint is on
    checkpoint_parts: Literal["all", "attention", "mlp"] = "all"  # which part of a block is recomputed
    attention: Literal["sdpa", "flash", "efficient", "math", "flex"] = "sdpa"  # kernel; sdpa: torch chooses


class OperatorConfig(Section):
    """Encoder, operator and decoder, and how a rollout is made of them."""

    pdet: PdetConfig = PdetConfig()
    encoder: Literal["patch", "perceiver"] = "patch"  # tokens ordered in space, or pooled by cross-attention
    decoder: Literal["local_basis", "unpatchify", "cross_attention"] = "local_basis"  # latent to any point
    basis_size: PositiveInt = 32  # local_basis: coefficients per token and channel
    fourier_modes: NonNegativeInt = 0  # along each axis, of a forecast's linear part; 0: the last frame stands for it
    means: Literal["free", "kept"] = "free"  # where an equation keeps a field's mean: left to training, or built in
    walls: Literal["hard", "free"] = "hard"  # known zero boundary values: built in, or left to the decoder
    rollout: Literal["reencode", "latent"] = "reencode"  # decode and encode again, or stay in latent space


class DiffusionConfig(Section):
    """The residual-correcting diffusion stage."""

    latent_dim: PositiveInt | None = None  # latent.dim, if given it must agree
    hidden_dim: PositiveInt = 256  # width of the denoiser
    depth: PositiveInt | None = None  # UPS's: blocks of the denoiser, no more than the operator's; empty: as many


class ModelConfig(Section):
    """Which network is trained, and how a plain nn.Module is called (docs/extending.md)."""

    build: str = "upsnb.models.ups:build"  # module:name or file.py:name; an nn.Module class, or a function
    settings: dict[str, Any] = {}  # arguments of that class; `latent` and `operator` are UPS's own
    layout: Literal["channels_first", "channels_last"] = "channels_first"  # axes that a plain nn.Module takes and gives
    append_parameters: bool = False  # PDE parameters, and the time step, as constant channels of its input
    source: str = ""  # text of file.py, filled when a run starts: it stays with the run
    pretrained: PathText | None = None  # run or packed model whose weights a new run begins with, where they fit


class TrainingConfig(Section):
    """How much is trained at a time, how fast, and on which losses."""

    device: Literal["auto", "cpu", "cuda"] = "auto"  # auto: CUDA where there is one
    num_gpus: PositiveInt = 1  # ranks, on all machines together; on the CPU that many processes
    num_nodes: PositiveInt = 1  # machines, which share the run's folder; each has as many of the ranks
    threads_per_rank: PositiveInt | None = None  # CPU threads of one rank; empty: cores / ranks
    seed: Seed = 42  # weights, data order, augmentation
    batch_size: PositiveInt = 8  # training pairs per rank and microbatch
    accum_steps: PositiveInt = 1  # microbatches per optimizer step
    num_workers: NonNegativeInt = 0  # processes of a machine that read HDF5 (residency workers), for all its ranks
    prefetch_factor: PositiveInt = 2  # batches read ahead by each worker
    pin_memory: bool = False  # page-locked host memory for copies to a GPU
    amp: bool = False  # autocast to amp_dtype
    amp_dtype: Literal["float16", "bfloat16", "float32"] = "float16"
    compile: bool = False  # torch.compile, per block and in place
    compile_mode: Literal["default", "reduce-overhead", "max-autotune"] = "default"
    tf32: bool = False  # TensorFloat-32 for float32 matrix products on CUDA
    no_sync: bool = True  # average gradients over ranks once a step, not after every microbatch
    nccl_tuning: bool = False  # NCCL with more sockets, threads and channels, set before the workers start
    bf16_gradients: bool = False  # DDP sends gradients in bfloat16
    expandable_segments: bool = False  # CUDA's allocator grows its segments, set before the workers start
    cpu_offload_optimizer: bool = False  # AdamW state in host memory
    use_fsdp2: bool = False  # shard parameters, gradients and optimizer state
    inverse_loss_frequency: PositiveInt = 1  # inverse losses every k-th microbatch
    query_sampling: QuerySamplingConfig = QuerySamplingConfig()
    lambda_relative: NonNegativeFloat = 1.0
    lambda_field: NonNegativeFloat = 0.0
    lambda_forward: NonNegativeFloat = 0.0
    lambda_inv_enc: NonNegativeFloat = 0.0
    lambda_inv_dec: NonNegativeFloat = 0.0
    lambda_spectral: NonNegativeFloat = 0.0
    lambda_rollout: NonNegativeFloat = 0.0
    lambda_boundary: NonNegativeFloat = 0.0
    lambda_conservation: NonNegativeFloat = 0.0
    lambda_positivity: NonNegativeFloat = 0.0
    lambda_latent_norm: NonNegativeFloat = 0.0
    lambda_latent_diversity: NonNegativeFloat = 0.0
    loss_warmup_steps: dict[str, NonNegativeInt] = {}  # term: steps over which its weight rises from 0
    loss_frequency: dict[str, PositiveInt] = {}  # term: computed every k-th microbatch
    noise: NonNegativeFloat = 0.0  # Gaussian noise on normalised inputs [standard deviations]
    grad_clip: PositiveFloat | None = 1.0  # largest gradient norm
    ema_decay: OpenFraction | None = None  # exponential moving average of the weights, used in evaluation
    time_stride: PositiveInt = 1  # saved times between two frames of the model
    patience: PositiveInt | None = None  # stop after so many validations without a better one
    time_limit_s: PositiveFloat | None = None  # wall time of training; schedules then follow the clock [s]
    stall_timeout_s: PositiveFloat = 600.0  # a rank without progress for so long is hung [s]
    max_restarts: NonNegativeInt = 0  # relaunches after a crash, from the last good checkpoint
    on_missing: Literal["error", "skip"] = "error"  # a phase that cannot run here: refuse, or leave it out and say so

    @property
    def ranks_per_node(self) -> int:
        """Ranks on each machine."""
        return self.num_gpus // self.num_nodes


class OptimizerConfig(Section):
    """Muon on hidden matrices and AdamW on the rest, or AdamW alone."""

    name: Literal["muon_hybrid", "adamw"] = "muon_hybrid"
    lr: PositiveFloat = 1.4e-3  # AdamW's peak learning rate
    muon_lr: PositiveFloat | None = None  # Muon's peak learning rate, AdamW-matched scale; empty: lr
    weight_decay: NonNegativeFloat = 0.03  # decoupled; never on norms and biases
    betas: tuple[OpenFraction, OpenFraction] = (0.9, 0.99)  # AdamW's moment decay rates
    momentum: OpenFraction = 0.95  # Muon's momentum
    fused: bool = False  # one fused AdamW kernel
    foreach: bool | None = None  # AdamW over lists of tensors; empty: torch chooses
    lr_scaling: Literal["none", "sqrt", "linear"] = "none"  # both learning rates with (pairs of a step / reference)
    lr_reference_batch: PositiveInt | None = None  # pairs of a step, all ranks, for which lr and muon_lr are meant


class SchedulerConfig(Section):
    """Learning rate over the stage."""

    name: Literal["cosine", "onecycle", "plateau", "constant"] = "cosine"
    warmup_fraction: OpenFraction = 0.02  # share of the stage with linearly rising learning rate
    min_lr_fraction: Fraction = 0.0  # learning rate at the end over its peak
    plateau_factor: OpenFraction = 0.5  # plateau: multiply by this
    plateau_patience: PositiveInt = 5  # plateau: after so many validations without a better one


class StageConfig(Section):
    """One training stage."""

    epochs: NonNegativeInt = 0  # passes over the largest dataset, mixed uniformly; 0: the stage is left out
    time_limit_s: PositiveFloat | None = None  # wall time of the stage; empty: training.time_limit_s [s]
    optimizer: OptimizerConfig | None = None  # empty: the top-level optimizer
    scheduler: SchedulerConfig = SchedulerConfig()


class OperatorStageConfig(StageConfig):
    """The stage that trains encoder, operator and decoder; no run is without it."""

    epochs: PositiveInt = 10  # passes over the largest dataset, mixed uniformly


class FinetuneStageConfig(StageConfig):
    """The operator trained on, through calls that are fed by those before: what any later stage has to beat."""

    unroll: Annotated[int, Field(ge=2, le=64)] = 4  # calls in a row at its end; it begins with two


class CrpsStageConfig(StageConfig):
    """The operator trained on to draw: its forecasts are to differ from each other as much as from the truth."""

    members: Annotated[int, Field(ge=2, le=16)] = 2  # forecasts of each pair in a step
    unroll: Annotated[int, Field(ge=1, le=64)] = 1  # calls in a row


class FrozenStageConfig(StageConfig):
    """A stage that calls a frozen model on every training pair."""

    cache: Literal["auto", "off"] = "auto"  # keep its forecasts on the disk, where reading them is faster


class StagesConfig(Section):
    """Training stages in their order."""

    operator: OperatorStageConfig = OperatorStageConfig()
    finetune: FinetuneStageConfig = FinetuneStageConfig()
    crps: CrpsStageConfig = CrpsStageConfig()
    refine: StageConfig = StageConfig()
    diff_residual: FrozenStageConfig = FrozenStageConfig()
    consistency_distill: FrozenStageConfig = FrozenStageConfig()

    @property
    def planned(self) -> list[str]:
        """Names of the stages that are trained, in their order."""
        return [name for name in type(self).model_fields if getattr(self, name).epochs > 0]


class CheckpointConfig(Section):
    """When the state of training is saved and how much of it is kept."""

    interval: PositiveInt = 500  # optimizer steps between two saves
    budget_gb: PositiveFloat = 20.0  # disk space for checkpoints [GB]
    resume: bool = False  # continue the run folder's latest checkpoint
    async_save: bool = False  # write to disk while training goes on
    mirror: MirrorConfig = MirrorConfig()


class GuardsConfig(Section):
    """What a run does by itself when training goes wrong; each act is an event.

    nonfinite: such steps change no weight, moment or average. On CUDA each step then waits for its loss and gradient
    norm, one small synchronisation. Overflows by which float16's scaler finds its scale do not count.
    out_of_memory: in a step, one rank alone in process, several by a relaunch from the last checkpoint. Microbatches
    fall to their largest divisor (30, 15, 5, 1) and grow again; each relapse doubles the wait.
    offload_overhead: 0.1 means 10 % more time for a step than without offload, by the 95 % interval of a `flip_effect`;
    a run that starts with offload on is tried without it for one window.
    validation_reference: compared at the same epoch, between two validations linearly, never beyond the last.
    """

    nonfinite: Literal["off", "bfloat16", "stop"] = "off"  # skip steps without a finite loss; after a row of them, this
    nonfinite_patience: PositiveInt = 3  # skipped steps in a row
    out_of_memory: bool = False  # a smaller microbatch and more accumulation, the effective batch stays
    regrow_steps: PositiveInt = 1000  # good steps until the microbatch grows again
    offload_overhead: PositiveFloat | None = None  # relative cost of a step above which offload is switched off
    validation_reference: PathText | None = None  # run that phase 3 must not fall behind; relative to the project
    validation_tolerance: PositiveFloat = 0.05  # relative excess of validation nRMSE over the reference's
    compile_failure: Literal["stop", "off"] = "stop"  # what a failing compilation does


class RunConfig(Section):
    """Everything a run depends on."""

    data: DataConfig = DataConfig()
    model: ModelConfig = ModelConfig()
    latent: LatentConfig = LatentConfig()
    operator: OperatorConfig = OperatorConfig()
    diffusion: DiffusionConfig = DiffusionConfig()
    training: TrainingConfig = TrainingConfig()
    stages: StagesConfig = StagesConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    guards: GuardsConfig = GuardsConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    cost: CostConfig = CostConfig()
    logging: LoggingConfig = LoggingConfig()

    @model_validator(mode="after")
    def _sections_agree(self) -> RunConfig:
        problems = contradictions(self)
        if problems:
            raise ConfigError(problems)
        return self

    def calls(self, stage: str = OPERATOR) -> int:
        """How many calls in a row, each fed by the one before, a stage trains through at most."""
        return max(getattr(getattr(self.stages, stage), "unroll", 1), 2 if self.training.lambda_rollout > 0 else 1)

    def passes(self, stage: str = OPERATOR) -> int:
        """How many forward passes of each pair a step of a stage holds at once."""
        return self.calls(stage) * getattr(getattr(self.stages, stage), "members", 1)

    def limit_s(self, stage: str = OPERATOR) -> float | None:
        """Wall time after which the clock ends a stage [s]."""
        return getattr(self.stages, stage).time_limit_s or self.training.time_limit_s


# -- reading and writing -------------------------------------------------------------------------------------------


@functools.cache
def declared(section: type[Section] = RunConfig, prefix: str = "") -> dict[str, Any]:
    """What settings, and sections of them, are declared as, by dotted path; of named mappings entries are `*`."""
    found = {}
    for name, field in section.model_fields.items():
        found[prefix + name] = kind = field.annotation
        if inner := section_of(kind):
            found |= declared(inner, f"{prefix}{name}.")
        elif typing.get_origin(kind) is dict and (inner := section_of(typing.get_args(kind)[1])):
            found |= declared(inner, f"{prefix}{name}.*.")
    return found


def setting_paths() -> tuple[str, ...]:
    """Dotted paths of every setting; entries of named mappings are written with `*`."""
    return tuple(path for path, kind in declared().items() if not section_of(kind))


def setting(config: RunConfig, path: str):
    """The value of a dotted setting."""
    return functools.reduce(getattr, path.split("."), config)


def nearest_setting(path: str) -> str:
    """A hint at the valid setting nearest to a misspelt dotted path."""
    valid = setting_paths()
    section, _, leaf = path.rpartition(".")
    siblings = {p.rpartition(".")[2]: p for p in valid if p.rpartition(".")[0] == section}
    leaves = {p.rpartition(".")[2]: p for p in valid}
    sections = {name: name for name in RunConfig.model_fields} if not section else {}
    for names in (sections, siblings, leaves):
        if close := difflib.get_close_matches(leaf, list(names), n=1, cutoff=0.6):
            return f"did you mean {names[close[0]]}?"
    if siblings:
        return f"{section} knows {', '.join(sorted(siblings))}"
    return f"the sections are {', '.join(RunConfig.model_fields)}"


def _explain(error: dict) -> Problem:
    path = ".".join(str(part) for part in error["loc"] if not _is_union_tag(part))
    found, kind = error["input"], error["type"]
    said = f"got the text {shown(found)}" if isinstance(found, str) else f"got {shown(found)}"
    if kind == "extra_forbidden":
        return Problem(path, "unknown setting", nearest_setting(path))
    if kind == "literal_error":
        return Problem(path, said, f"choose {error['ctx']['expected']}")
    if isinstance(found, str) and kind in ("float_type", "int_type", "float_parsing", "int_parsing"):
        if parts := re.fullmatch(r"([+-]?(?:\d+\.?\d*|\.\d+))[eE]([+-]?)(\d+)", found):
            mantissa, sign, exponent = parts.groups()
            if kind.startswith("int"):
                return Problem(path, said, "write a whole number with all its digits")
            written = f"{mantissa}{'' if '.' in mantissa else '.0'}e{sign or '+'}{exponent}"
            return Problem(path, said, f"write {written} (YAML wants the dot and the sign)")
        return Problem(path, said, "write a number without quotes")
    return Problem(path, said, error["msg"][0].lower() + error["msg"][1:])


def _is_union_tag(part) -> bool:
    return isinstance(part, str) and (part in ("float", "int", "str", "[key]") or part.endswith("Config"))


def validate(values: dict, where: str = "the configuration") -> RunConfig:
    """Build a RunConfig from nested plain data.

    Raises:
        ConfigError: every unknown key, wrong type and contradiction at once.
    """
    try:
        # Through JSON: lists become tuples while numbers and texts stay strictly apart.
        return RunConfig.model_validate_json(json.dumps(values, ensure_ascii=False).encode())
    except ValidationError as error:
        problems = []
        for item in error.errors():
            cause = item.get("ctx", {}).get("error")
            problems += cause.problems if isinstance(cause, ConfigError) else [_explain(item)]
        raise ConfigError(problems, where) from None
    except (TypeError, ValueError, RecursionError) as error:  # of JSON: objects, half characters, 5000 digits, loops
        model = values.get("model")
        if isinstance(model, dict) and callable(made := model.get("build")):
            name = getattr(made, "__name__", type(made).__name__).strip("<>")
            remedy = f"write it into a file (%%writefile my_model.py) and set model.build: my_model.py:{name}"
            raise ConfigError([Problem("model.build", f"no worker finds {shown(made)}", remedy)], where) from None
        raise ConfigError([f"{error} -> use numbers, texts, lists and mappings only"], where) from None


def dump(config: RunConfig) -> str:
    """The resolved config as YAML text that `parse` reads back to an equal one."""
    return yaml.dump({"format": FORMAT, **config.model_dump(mode="json")}, Dumper=_Dumper, sort_keys=False)


class _Dumper(yaml.SafeDumper):
    """A text of several lines, such as a model's, is written line by line."""

    def represent_str(self, text: str):
        return self.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Dumper.add_representer(str, _Dumper.represent_str)


def save(config: RunConfig, path: Path) -> None:
    """Write the resolved config for `load`."""
    Path(path).write_text(dump(config))


def load(path: Path) -> RunConfig:
    """Read a resolved config as `save` wrote it."""
    return parse(Path(path).read_text(), str(path))


def parse(text: str, where: str = "the saved configuration") -> RunConfig:
    """A config from the text that `dump` gave."""
    values = plain_yaml.mapping(text, where)
    if (found := values.pop("format", None)) != FORMAT:
        raise ConfigError([f"format: found {found!r}, this version reads {FORMAT}"], where)
    return validate(values, where)
