"""A RunConfig that exists is valid, says everything about a run, and comes back from disk as it went."""

import random
import typing

import pytest
import torch
import yaml
from pydantic import ValidationError

from upsnb import config as configs
from upsnb.config import RunConfig, nearest_setting, setting_paths, validate
from upsnb.errors import ConfigError, Problem, shown
from upsnb.rules import TAKEN

OTHER = {  # a valid value that is not the default, for settings whose type does not suggest one
    "data.datasets": {"one": {"family": "darcy2d", "files": ["a.h5", "b.h5"], "generate": {"seed": 3}}},
    "operator.pdet.input_dim": 128,
    "diffusion.latent_dim": 128,
    "training.loss_warmup_steps": {"spectral": 10},
    "training.loss_frequency": {"spectral": 2},
    "optimizer.betas": [0.8, 0.95],
    "optimizer.foreach": True,
    "guards.validation_reference": "outputs/baseline",
    "model.pretrained": "outputs/baseline",
    "model.settings": {"width": 8},
    "data.workload_settings": {"context": 96},
    "data.mixing.from_epoch": {"darcy": 1},
}
OTHER |= {f"stages.{stage}.optimizer": {"lr": 1e-4} for stage in configs.StagesConfig.model_fields}
NEEDS = {
    "training.num_nodes": {"training.num_gpus": 2},  # other settings without which a value would contradict the rest
    "operator.encoder": {"operator.decoder": "cross_attention"},
    "training.lambda_boundary": {"operator.walls": "free"},
    "optimizer.lr_scaling": {"optimizer.lr_reference_batch": 96},
    "cost.budget": {"cost.price_per_hour": 1.0},
    "data.workload": {"data.datasets": {}},
    "data.workload_settings": {"data.workload": "examples/text.py:Text", "data.datasets": {}},
    "stages.consistency_distill.epochs": {"stages.diff_residual.epochs": 1},
    "operator.rollout": {"training.lambda_forward": 1.0, "training.lambda_inv_enc": 1.0},
}


def get(values: dict, path: str):
    for key in path.split("."):
        values = values[key]
    return values


def put(values: dict, path: str, value) -> dict:
    *parents, leaf = path.split(".")
    node = values
    for key in parents:
        node = node.setdefault(key, {})
    node[leaf] = value
    return values


SETTINGS = [p for p in setting_paths() if "*" not in p and ".optimizer." not in p]  # a stage has one only if told to
DEFAULTS = RunConfig().model_dump(mode="json")


def annotation(path: str):
    section, names = RunConfig, path.split(".")
    for name in names[:-1]:
        section = section.model_fields[name].annotation
    return section.model_fields[names[-1]].annotation


def another(path: str):
    """A valid value other than the default."""
    default, kind = get(DEFAULTS, path), annotation(path)
    if path in OTHER:
        return OTHER[path]
    if typing.get_origin(kind) is typing.Literal:
        return next(choice for choice in typing.get_args(kind) if choice != default)
    if isinstance(default, bool):
        return not default
    if isinstance(default, int):
        return default * 2 or 1
    if isinstance(default, float):
        return default / 2 or 0.25
    if default is None:
        return 0.5 if "float" in str(kind) else 1
    return default + "x"


def test_default_config_is_valid_and_frozen():
    with pytest.raises(ValidationError):
        RunConfig().training.batch_size = 3


@pytest.mark.parametrize("path", SETTINGS)
def test_every_setting_round_trips_through_disk(path, tmp_path):
    value = another(path)
    values = put({}, path, value)
    for needed, its_value in NEEDS.get(path, {}).items():
        put(values, needed, its_value)
    config = validate(values)
    assert config != RunConfig()
    configs.save(config, tmp_path / "config.yaml")
    loaded = configs.load(tmp_path / "config.yaml")
    assert loaded == config
    written = get(loaded.model_dump(mode="json"), path)
    if not isinstance(value, dict):
        assert written == value and type(written) is type(value)


def test_settings_of_a_workload_without_one_are_refused():
    with pytest.raises(ConfigError, match="data.workload_settings: are for a workload, and fields have none -> "):
        validate({"data": {"workload_settings": {"context": 96}}})


def test_saved_config_holds_every_default(tmp_path):
    configs.save(RunConfig(), tmp_path / "config.yaml")
    assert yaml.safe_load((tmp_path / "config.yaml").read_text()) == {"format": configs.FORMAT, **DEFAULTS}


def test_config_of_another_format_is_refused(tmp_path):
    (tmp_path / "config.yaml").write_text("format: 99\n")
    with pytest.raises(ConfigError, match="format: found 99, this version reads 1"):
        configs.load(tmp_path / "config.yaml")


def test_every_problem_is_listed_at_once_with_the_nearest_name():
    with pytest.raises(ConfigError) as caught:
        validate(
            {
                "training": {"batchsize": 4, "accum_steps": 0, "compile": "yes", "ema_decay": 1.5, "amp_dtype": "fp16"},
                "latnet": {"dim": 3},
                "optimizer": {"lr": "3e-4", "betas": [0.9]},
                "data": {"datasets": {"a": {"family": "darcy3d", "fils": []}}},
            },
            "params/x.yaml",
        )
    said = str(caught.value)
    assert said.startswith(f"{len(caught.value.problems)} problems in params/x.yaml")
    for expected in (
        "training.batchsize: unknown setting -> did you mean training.batch_size?",
        "training.accum_steps: got 0",
        "training.compile: got the text 'yes'",
        "training.ema_decay: got 1.5",
        "training.amp_dtype: got the text 'fp16' -> choose 'float16', 'bfloat16' or 'float32'",
        "latnet: unknown setting -> did you mean latent?",
        "optimizer.lr: got the text '3e-4' -> write 3.0e-4 (YAML wants the dot and the sign)",
        "optimizer.betas",
        "data.datasets.a.family: got the text 'darcy3d'",
        "data.datasets.a.fils: unknown setting",
    ):
        assert expected in said
    assert len(caught.value.problems) == 10


@pytest.mark.parametrize("text", ["3e-4", "1e4", "1.0e4", "-2E3", ".5e3"])
def test_hinted_number_is_a_number_to_yaml(text):
    assert isinstance(yaml.safe_load(text), str)
    with pytest.raises(ConfigError) as caught:
        validate({"optimizer": {"lr": text}})
    hint = str(caught.value).partition("-> write ")[2].split()[0]
    assert yaml.safe_load(hint) == float(text)
    with pytest.raises(ConfigError, match=r"got the text .* -> write a whole number with all its digits"):
        validate({"training": {"batch_size": text}})


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"operator": {"pdet": {"num_heads": 7}}}, "operator.pdet.num_heads"),
        ({"operator": {"pdet": {"input_dim": 64}}}, "operator.pdet.input_dim: is 64 but latent.dim is 128"),
        ({"diffusion": {"latent_dim": 64}}, "diffusion.latent_dim: is 64 but latent.dim is 128"),
        ({"diffusion": {"depth": 13}}, "diffusion.depth: 13, and operator.pdet.depth is 12"),
        ({"data": {"datasets": {}}}, "data.datasets: is empty"),
        ({"data": {"datasets": {"d": {"family": "darcy2d", "input_frames": 2}}}}, "data.datasets.d: is static"),
        ({"data": {"mixing": {"from_epoch": {"dacry": 1}}}}, "from_epoch.dacry: no dataset has this name -> did you"),
        ({"data": {"mixing": {"from_epoch": {"darcy": 10}}}}, "from_epoch.darcy: 10, and a stage ends after 10 epochs"),
        ({"data": {"mixing": {"from_epoch": {"darcy": 1, "advection": 1}}}}, "no dataset is there from epoch 0 on"),
        (
            {"data": {"mixing": {"by": "loss"}, "split": {"validation_fraction": 0.0}}},
            "data.mixing.by: loss is that of",
        ),
        ({"training": {"lambda_relative": 0.0}}, "every loss weight is 0"),
        ({"training": {"loss_frequency": {"spectrl": 2}}}, "did you mean spectral?"),
        ({"training": {"loss_frequency": {"inv_enc": 2}}}, "follow training.inverse_loss_frequency"),
        ({"operator": {"rollout": "latent"}}, "latent needs training.lambda_forward > 0"),
        ({"training": {"lambda_boundary": 1.0}}, "acts on nothing while operator.walls is hard"),
        ({"training": {"lambda_relative": 0.0, "lambda_positivity": 1.0}}, "nothing would train on it"),
        ({"optimizer": {"fused": True, "foreach": True}}, "either fused or foreach"),
        ({"optimizer": {"lr_scaling": "sqrt"}}, "optimizer.lr_reference_batch: is empty, and lr_scaling is sqrt"),
        ({"stages": {"operator": {"optimizer": {"lr_scaling": "linear"}}}}, "stages.operator.optimizer.lr_reference"),
    ],
)
def test_contradictions_name_the_setting(values, said):
    with pytest.raises(ConfigError, match=".") as caught:
        validate(values)
    assert said in str(caught.value)


@pytest.mark.parametrize(
    "values",
    [
        {"training": {"lambda_field": float("inf")}},
        {"training": {"lambda_field": 1e300}},
        {"training": {"seed": 2**63}},
        {"training": {"batch_size": 2**31}},
        {"training": {"stall_timeout_s": 1e10}},  # no clock waits so long
        {"data": {"datasets": {"a": {"family": "darcy2d", "generate": {"seed": 2**63}}}}},
        {"data": {"datasets": {"a": {"family": "darcy2d", "generate": {"parameter": float("nan")}}}}},
        {"data": {"datasets": {"a": {"family": "darcy2d", "files": ["x" * 300]}}}},
        {"data": {"split": {"validation_fraction": 0.5, "test_fraction": 0.5}}},
        *({"data": {"datasets": {name: {"family": "darcy2d"}}}} for name in ("a.b", "a/b", "a\nb", "", "train", "ä")),
        *({"logging": {"name": name}} for name in ("../out", "a/../../b", "/a", "a//b", "a\nb", "", "..", "x" * 200)),
        *({section: {"root": root}} for section in ("data", "logging") for root in ("a\nb", "a\0", "x" * 300)),
        {"guards": {"validation_reference": "a\0"}},
        {"operator": {"pdet": {"mlp_ratio": 1e-9}}},
        {"operator": {"decoder": "cross_attention"}, "latent": {"dim": 33}},
        {"training": {"seed": 10**5000}},
        {"model": {"settings": {"a": 10**5000}}},
    ],
    ids=lambda values: shown(values)[:60],
)
def test_what_would_break_a_run_later_is_refused_by_name(values):
    with pytest.raises(ConfigError) as caught:
        validate(values)
    (problem,) = str(caught.value).split("\n  ")[1:]
    assert " -> " in problem and len(problem) < 400


@pytest.mark.parametrize("name", ["2gpu", "study/first", "lr=1e-3, seed (2)", "größer", "a..b"])
def test_a_run_may_be_called_what_stays_below_its_root(name):
    assert validate({"logging": {"name": name}}).logging.name == name


def test_no_dataset_can_have_a_name_that_torch_takes():
    assert {name for name in dir(torch.nn.ModuleDict()) if not name.startswith("_")} <= TAKEN
    torch.nn.ModuleDict({"a-b": torch.nn.Identity(), "0": torch.nn.Identity()})


def test_contradictions_are_listed_together():
    values = {"operator": {"pdet": {"num_heads": 7, "input_dim": 64}}, "training": {"lambda_relative": 0.0}}
    with pytest.raises(ConfigError) as caught:
        validate(values)
    assert len(caught.value.problems) == 3


def test_numbers_and_texts_are_not_confused():
    for wrong in ({"batch_size": "8"}, {"batch_size": 8.0}, {"compile": 1}, {"grad_clip": True}):
        with pytest.raises(ConfigError):
            validate({"training": wrong})
    assert validate({"training": {"grad_clip": 1}}).training.grad_clip == 1.0


def test_what_is_no_plain_data_is_refused():
    with pytest.raises(ConfigError, match="numbers, texts, lists and mappings"):
        validate({"training": {"batch_size": object()}})


@pytest.mark.parametrize("seed", range(3))
def test_misspelt_settings_are_recognised(seed):
    draw = random.Random(seed)
    for path in (p for p in setting_paths() if "*" not in p):
        section, _, leaf = path.rpartition(".")
        if len(leaf) < 5 or not section:
            continue
        at = draw.randrange(1, len(leaf) - 1)
        misspelt = leaf[:at] + leaf[at + 1 :]  # one letter is missing
        hint = nearest_setting(f"{section}.{misspelt}")
        assert hint.startswith(f"did you mean {section}."), (path, misspelt, hint)


def test_a_problem_reads_as_where_what_and_remedy_and_is_told_once():
    problem = Problem("training.compile", "is on", "set it to false")
    error = ConfigError([problem, "a sentence", problem], "here")
    assert str(error) == "2 problems in here\n  training.compile: is on -> set it to false\n  a sentence"
    assert error.problems == [problem, "a sentence"]
