"""Overlays: every written form leads to the same config, every slip is named, every way there leads back."""

import random
from pathlib import Path

import pytest

from upsnb import config as configs
from upsnb import overlays
from upsnb.config import RunConfig, setting_paths
from upsnb.errors import ConfigError

PARAMS = Path(__file__).resolve().parents[1] / "params"
TABLE = {  # the reference setups: num_gpus, batch, accum, checkpoint, compile, mode, amp_dtype, workers, prefetch, ...
    "2gpu_baseline": (2, 8, 6, False, False, "default", "float16", 8, 4, False, False, 1, 2048),
    "2gpu_optimized": (2, 30, 2, True, True, "default", "bfloat16", 6, 2, True, False, 4, 1024),
    "4gpu_baseline": (4, 8, 3, False, False, "default", "float16", 8, 4, False, False, 1, 2048),
    "4gpu_optimized": (4, 24, 2, True, True, "default", "bfloat16", 12, 2, True, True, 4, 1024),
}
ROLLBACKS = [
    ("use_fsdp2: false\nbatch_size: 20", {"training.use_fsdp2": False, "training.batch_size": 20}),
    ("cpu_offload_optimizer: false\nbatch_size: 16",
     {"training.cpu_offload_optimizer": False, "training.batch_size": 16}),
    ("inverse_loss_frequency: 2\nnum_queries: 1536",
     {"training.inverse_loss_frequency": 2, "training.query_sampling.num_queries": 1536}),
    ("use_activation_checkpoint: false\nbatch_size: 8\naccum_steps: 3",
     {"operator.pdet.use_activation_checkpoint": False, "training.batch_size": 8, "training.accum_steps": 3}),
    ("compile: false", {"training.compile": False}),
]  # fmt: skip


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def problems(function, *arguments) -> str:
    with pytest.raises(ConfigError) as caught:
        function(*arguments)
    return str(caught.value)


# -- written forms -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", [p for p in setting_paths() if "*" not in p])
def test_nested_and_dotted_forms_agree(path):
    nested: object = 1
    for key in reversed(path.split(".")):
        nested = {key: nested}
    assert overlays.flatten(nested) == overlays.flatten({path: 1}) == {path: 1}


@pytest.mark.parametrize(
    ("name", "path"),
    [
        ("compile", "training.compile"),
        ("num_queries", "training.query_sampling.num_queries"),
        ("query_sampling.num_queries", "training.query_sampling.num_queries"),
        ("hidden_dim", "operator.pdet.hidden_dim"),  # not the denoiser's
        ("pdet.depth", "operator.pdet.depth"),
        ("lr", "optimizer.lr"),  # not a stage's
        ("dim", "latent.dim"),
        ("budget_gb", "checkpoint.budget_gb"),  # only one setting ends so
    ],
)
def test_flat_names_are_found(name, path):
    assert overlays.flatten({name: 1}) == {path: 1}


def test_flat_sections_are_found():
    assert overlays.flatten({"pdet": {"depth": 3}}) == {"operator.pdet.depth": 3}


def test_ambiguous_flat_name_lists_its_meanings():
    said = problems(overlays.flatten, {"epochs": 3})
    assert "epochs: is ambiguous -> write one of stages.consistency_distill.epochs, " in said


def test_every_unknown_key_is_listed_with_the_nearest():
    said = problems(overlays.flatten, {"training": {"bach_size": 1, "amp": True}, "opimizer": {}, "latent": 3})
    assert said.startswith("3 problems")
    for expected in ("did you mean training.batch_size?", "did you mean optimizer?", "latent: got 3 -> it is"):
        assert expected in said


@pytest.mark.parametrize(("text", "expected"), ROLLBACKS)
def test_rollback_snippets_load_as_they_are_written(text, expected, tmp_path):
    flat = overlays.flatten(overlays.read(write(tmp_path / "rollback.yaml", text)))
    assert flat == expected
    optimized = overlays.load(PARAMS / "4gpu_optimized.yaml")
    rolled_back = overlays.load(PARAMS / "4gpu_optimized.yaml", tmp_path / "rollback.yaml")
    changed = overlays.difference(optimized, rolled_back)
    assert changed == {path: value for path, value in expected.items() if path in changed} and changed


# -- files ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", TABLE)
def test_reference_files_resolve_to_the_table(name):
    config = overlays.load(PARAMS / f"{name}.yaml")
    pdet, training = config.operator.pdet, config.training
    found = (
        training.num_gpus, training.batch_size, training.accum_steps, pdet.use_activation_checkpoint,
        training.compile, training.compile_mode, training.amp_dtype, training.num_workers, training.prefetch_factor,
        training.cpu_offload_optimizer, training.use_fsdp2, training.inverse_loss_frequency,
        training.query_sampling.num_queries,
    )  # fmt: skip
    assert found == TABLE[name]
    assert (config.latent.dim, config.latent.tokens) == (128, 128)
    assert (pdet.hidden_dim, pdet.depth, pdet.num_heads, pdet.qk_norm) == (384, 12, 8, True)
    optimizer = config.optimizer
    assert (optimizer.name, optimizer.lr, optimizer.weight_decay) == ("muon_hybrid", 1.4e-3, 0.03)
    assert (training.ema_decay, config.stages.operator.epochs, training.seed) == (0.999, 40, 42)
    assert training.amp  # otherwise amp_dtype changes nothing
    four = name.startswith("4gpu")  # the 2-GPU setup was published without inverse losses and physics terms
    weights = (
        training.lambda_inv_enc,
        training.lambda_inv_dec,
        training.lambda_conservation,
        training.lambda_positivity,
    )
    assert [weight > 0 for weight in weights] == [four] * 4


def test_unreadable_files_say_what_they_are(tmp_path):
    assert "x.yaml: no such file" in problems(overlays.read, tmp_path / "x.yaml").replace("\n  ", ": ")
    assert "not YAML" in problems(overlays.read, write(tmp_path / "a.yaml", "a: [1"))
    assert "got list at the top" in problems(overlays.read, write(tmp_path / "a.yaml", "- 1"))
    assert "cannot name another" in problems(overlays.read, write(tmp_path / "a.yaml", "preset: quick"))
    assert overlays.read(write(tmp_path / "a.yaml", "# nothing\n")) == {}


def test_a_misspelt_setting_hides_no_wrong_value_beside_it(tmp_path):
    path = write(tmp_path / "x.yaml", "training:\n  query_sampling:\n    num_queres: 9\n    jitter: 7.0\n")
    said = problems(overlays.load, path)
    assert "x.yaml:3: training.query_sampling.num_queres: unknown setting -> did you mean" in said
    assert "x.yaml:4: training.query_sampling.jitter: got 7.0" in said


def test_later_files_and_overrides_win(tmp_path):
    one = write(tmp_path / "1.yaml", "batch_size: 2\naccum_steps: 2\nseed: 2")
    two = write(tmp_path / "2.yaml", "training: {accum_steps: 3, seed: 3}")
    training = overlays.load(one, two, overrides={"seed": 4}).training
    assert (training.batch_size, training.accum_steps, training.seed) == (2, 3, 4)


def test_yaml_text_that_was_meant_as_a_number_is_explained(tmp_path):
    said = problems(overlays.load, write(tmp_path / "a.yaml", "lr: 3e-4"))
    assert "a.yaml" in said and "optimizer.lr: got the text '3e-4' -> write 3.0e-4" in said


def test_a_problem_of_several_files_names_its_file_and_line(tmp_path):
    one = write(tmp_path / "1.yaml", "seed: 2\n\nbach_size: 2")
    two = write(tmp_path / "2.yaml", "operator:\n  pdet:\n    depth: 0\n    hidden_dim: 100")
    with pytest.raises(ConfigError) as caught:
        overlays.load(one, two, tmp_path / "3.yaml", overrides={"optimizer.lr": "x"})
    said = str(caught.value)
    for expected in ("1.yaml:3: bach_size: unknown", "2.yaml:3: operator.pdet.depth: got 0", "3.yaml: no such file",
                     "the overrides: optimizer.lr: got the text 'x'"):  # fmt: skip
        assert expected in said


def test_a_contradiction_is_told_with_the_last_that_took_part_in_it(tmp_path):
    heads, width = write(tmp_path / "1.yaml", "num_heads: 6"), write(tmp_path / "2.yaml", "hidden_dim: 40")
    assert "2.yaml: operator.pdet.num_heads: 40 over 6 heads" in problems(overlays.load, heads, width)
    assert "1.yaml:1: operator.pdet.num_heads: 40 over 6 heads" in problems(overlays.load, width, heads)


# -- null, mappings of named things --------------------------------------------------------------------------------


def test_null_resets_or_empties():
    config = overlays.resolve({"batch_size": 3, "num_queries": 9, "stages.operator.optimizer.lr": 1.0})
    nothing = dict.fromkeys(("batch_size", "num_queries", "grad_clip", "stages.operator.optimizer"))
    reset = overlays.apply(config, overlays.flatten(nothing))
    assert reset.training.batch_size == RunConfig().training.batch_size
    assert reset.training.query_sampling.num_queries is None
    assert reset.training.grad_clip is None  # its default clips; there is no other way to say "do not"
    assert reset.stages.operator.optimizer is None
    assert overlays.resolve({"stages.operator.optimizer.lr": None}) == RunConfig(), "it takes the top-level one still"


def test_empty_section_is_refused():
    """A section whose lines are all commented out is null in YAML; it must not wipe what stands below."""
    assert "it is a section" in problems(overlays.flatten, {"training": None})


def test_named_mappings_are_replaced_whole_and_changed_by_path():
    whole = {"data": {"datasets": {"only": {"family": "darcy2d"}}}}
    assert list(overlays.resolve(whole).data.datasets) == ["only"]
    one = overlays.resolve({"data.datasets.advection.augment": False})
    assert list(one.data.datasets) == ["advection", "darcy"] and not one.data.datasets["advection"].augment
    assert one.data.datasets["advection"].input_frames == 4
    assert list(overlays.resolve({"data.datasets.darcy": None}).data.datasets) == ["advection"]
    both = overlays.resolve({"data.datasets.only.num_samples": 3, **whole})
    assert both.data.datasets["only"].num_samples == 3
    assert list(overlays.resolve({"data.datasets.advection.augment": False}, whole).data.datasets) == ["only"]


@pytest.mark.parametrize("path", ["data.datasets.advection.family.x", "training.loss_frequency.spectral.x"])
def test_nothing_is_below_a_single_value(path):
    base = overlays.resolve({"training.loss_frequency": {"spectral": 2}})
    assert "holds a single value" in problems(overlays.apply, base, {path: 1})


def test_inputs_are_left_alone():
    overlay = {"data": {"datasets": {"d": {"family": "darcy2d"}}}, "training": {"batch_size": 3}}
    copy = {"data": {"datasets": {"d": {"family": "darcy2d"}}}, "training": {"batch_size": 3}}
    base = RunConfig()
    overlays.resolve(overlay, {"data.datasets.d.augment": True}, base=base)
    assert overlay == copy and base == RunConfig()


# -- difference ----------------------------------------------------------------------------------------------------

CHOICES = [
    {"training.batch_size": 3}, {"training.grad_clip": None}, {"training.grad_clip": 0.5}, {"training.ema_decay": 0.9},
    {"operator.pdet.depth": 2}, {"stages.operator.optimizer": {"name": "adamw"}}, {"stages.operator.optimizer": None},
    {"stages.operator.optimizer.lr": 0.1}, {"data.datasets.darcy": None}, {"data.datasets.advection.augment": False},
    {"training.loss_frequency": {"spectral": 2}}, {"training.query_sampling.num_queries": 7},
    {"optimizer.betas": [0.5, 0.6]}, {"training.loss_warmup_steps.spectral": 9}, {"training.compile": True},
]  # fmt: skip


@pytest.mark.parametrize("seed", range(20))
def test_difference_then_apply_is_identity_both_ways(seed):
    draw = random.Random(seed)
    old, new = (overlays.resolve(*draw.sample(CHOICES, 5)) for _ in range(2))
    for a, b in ((old, new), (new, old)):
        change = overlays.difference(a, b)
        assert overlays.apply(a, change) == b
        assert overlays.apply(a, overlays.flatten(change)) == b  # the way a running worker takes it
    assert overlays.difference(new, new) == {}


def test_saved_config_is_an_overlay_that_leads_to_itself(tmp_path):
    config = overlays.load(PARAMS / "4gpu_optimized.yaml")
    configs.save(config, tmp_path / "c.yaml")
    assert configs.load(tmp_path / "c.yaml") == overlays.resolve(overlays.difference(RunConfig(), config)) == config


# -- notebooks -----------------------------------------------------------------------------------------------------


def test_notebook_sections_and_injected_flat_names_take_effect():
    variables = {"use_fsdp2": True, "preset": "quick", "latent": {}, "training": {"batch_size": 3, "use_fsdp2": False}}
    config = overlays.from_notebook(variables)
    assert config.training.use_fsdp2 and config.training.batch_size == 3
    assert config.latent == overlays.load(PARAMS / "quick.yaml").latent


def test_notebook_problems_are_listed_at_once():
    variables = {"training": {"bach_size": 3, "accum_steps": 0}, "use_fdsp2": True, "latent": 3, "lr": "3e-4"}
    said = problems(overlays.from_notebook, variables)
    assert said.startswith("5 problems in the notebook's parameters")
    for expected in ("training.batch_size?", "accum_steps: got 0", "training.use_fsdp2?", "latent: got 3", "3.0e-4"):
        assert expected in said


def test_notebook_problems_name_preset_and_papermill(tmp_path):
    preset = write(tmp_path / "low.yaml", "seed: 1\nlatent:\n  dim: 0")
    variables = {"preset": str(preset), "batch_size": 0, "lr": "x"}
    with pytest.raises(ConfigError) as caught:
        overlays.of_notebook(variables, (), injected=["lr"]).config()
    for expected in ("low.yaml:3: latent.dim", "\n  training.batch_size: got 0", "given to papermill: optimizer.lr:"):
        assert expected in str(caught.value)


@pytest.mark.parametrize(
    ("name", "kind", "value", "said"),
    [
        ("fail_on_verdict", bool, "false", "fail_on_verdict: got 'false' -> write true or false"),  # a text is true
        ("seeds", list[int], 42, "seeds: got 42 -> write list[int]"),
        ("chosen", list[str], "compile", "chosen: got 'compile' -> write list[str]"),
        ("block_s", float, "5s", "block_s: got '5s' -> write a number"),
    ],
)
def test_a_parameter_of_the_notebook_s_own_has_the_type_that_its_cell_says(name, kind, value, said):
    assert said in problems(overlays.from_notebook, {name: value, "__annotations__": {name: kind}}, (name,))
    text = kind.__name__ if type(kind) is type else str(kind)
    assert list(overlays.of_other_types({name: value}, {name: text}, [name])) == [said], "as a command reads the cell"
    assert not list(overlays.of_other_types({name: value}, {name: "Unknown"}, [name]))
    for right in (None, {bool: True, list[int]: [1, 2], list[str]: [], float: 5}[kind]):
        variables = {name: right, "__annotations__": {name: kind}}
        assert overlays.from_notebook(variables, own=(name,)) == RunConfig()


def test_what_is_no_parameter_is_passed_over():
    variables = {"In": [""], "Out": {}, "exit": 1, "quit": 1, "get_ipython": 1, "open": 1, "_dh": [], "np": overlays}
    assert overlays.from_notebook({**variables, "run_folder": "x", "arms": [1]}, own=("arms",)) == RunConfig()
    assert "arms: unknown setting" in problems(overlays.from_notebook, {"arms": [1]})


def test_running_the_parameters_again_minds_no_variable_of_later_cells():
    cells = ["", "preset = ''\ntraining: dict = {}\nold = 1", "# Parameters\nseed = 5", "%magic", "row = {}"]
    variables = {"In": cells, "preset": "", "training": {}, "seed": 5, "row": {}, "old": 1}
    assert "old: unknown setting" in problems(overlays.from_notebook, variables)
    variables["In"] = [*cells, "preset = ''\ntraining: dict = {}\nseed = 5"]  # run again, without `old`
    assert overlays.from_notebook(variables).training.seed == 5


def test_a_knob_left_at_none_is_as_the_preset_says():
    knobs = {"preset": "quick", "time_limit_s": None, "batch_size": 3}
    config = overlays.from_notebook(knobs)
    assert (config.training.time_limit_s, config.training.batch_size) == (150, 3)
    assert overlays.of_notebook(knobs, (), injected=["time_limit_s"]).config().training.time_limit_s is None
    assert "did you mean" in problems(overlays.from_notebook, {"time_limt_s": None})


def test_what_papermill_injects_goes_over_every_knob():
    cells = ["preset = ''\nbatch_size: int = 3\nseed: int = 3\ngrad_clip: float = None", "# Parameters\ntraining = {}"]
    variables = {"In": cells, "preset": "", "batch_size": 3, "seed": 3, "grad_clip": None}
    variables["training"] = {"batch_size": 4, "grad_clip": 0.5}
    training = overlays.from_notebook(variables).training
    assert (training.batch_size, training.seed, training.grad_clip) == (4, 3, 0.5)


def test_presets_are_names_or_paths(tmp_path, monkeypatch):
    quick = overlays.load(PARAMS / "quick.yaml")
    monkeypatch.chdir(tmp_path)
    for preset in ("quick", "quick.yaml", str(PARAMS / "quick")):
        assert overlays.from_notebook({"preset": preset}) == quick
    assert "quick.yaml" in problems(overlays.from_notebook, {"preset": "qick"})
    (tmp_path / "params").mkdir()
    write(tmp_path / "params" / "mine.yaml", "seed: 9")
    assert overlays.from_notebook({"preset": "mine"}).training.seed == 9


@pytest.mark.parametrize("given", ["quick", "quick.yaml", "params/quick.yaml", "params/quick"])
def test_params_files_of_the_project_are_found_from_anywhere_and_ones_own_come_first(tmp_path, monkeypatch, given):
    monkeypatch.chdir(tmp_path)
    assert overlays.params_path(given).resolve() == (PARAMS / "quick.yaml").resolve()
    own = tmp_path / given
    own.parent.mkdir(exist_ok=True)
    own.write_text("seed: 9")
    assert overlays.params_path(given).resolve() == own


@pytest.mark.parametrize("given", ["qick", "params/qick.yaml"])
def test_a_params_file_that_is_nowhere_is_missed_where_others_are(tmp_path, monkeypatch, given):
    monkeypatch.chdir(tmp_path)
    assert "did you mean quick.yaml?" in problems(overlays.read, overlays.params_path(given))
