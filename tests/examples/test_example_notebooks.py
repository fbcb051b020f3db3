"""The examples, headless and small: their notebooks, and what the workbench does with fields, done with them."""

import functools
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from small_examples import COMMON, ROOT, SMALL

from upsnb import hardware, overlays, phases
from upsnb.errors import ConfigError
from upsnb.memory import measure
from upsnb.memory.predict import predict
from upsnb.report import figures, results
from upsnb.runs import handle, runfolder
from upsnb.training import checkpoint, workload
from upsnb.training.losses import Objective
from upsnb.widgets.progress import Progress

FIGURES = {"affinity": 3, "long_context": 3, "mmdit": 4}  # at least
PARAMS = sorted((ROOT / "examples").glob("*/params/*.yaml"))
WORDS = {  # what it counts, its error, its own figures
    "affinity": ("pairs", "1 - Spearman", {"affinity"}),
    "long_context": ("tokens", "perplexity", {"perplexity_text"}),
    "mmdit": ("pictures", "attribute error", {"samples", "loss_by_time", "accuracy"}),
}
HOT = [phase for phase in phases.BY_NAME.values() if phase.hot and "training.compile" not in phase.on]
RECOMPUTED = {"operator.pdet.use_activation_checkpoint": True}
LARGER = {  # so that a step takes more than what stands beside it
    "affinity": {"training.batch_size": 64},
    "long_context": {"data.workload_settings.context": 256},
    "mmdit": {"model.settings.width": 48},
}


def test_every_example_has_one():
    assert sorted(path.stem for path in (ROOT / "examples").glob("*/*.ipynb")) == sorted(SMALL)


def small_file(name: str, folder: Path) -> Path:
    """Its params/cpu.yaml, but that it trains in seconds, on data of its own."""
    own = {"training.time_limit_s": 4, "training.compile": False, "data.root": str(folder / "data")}
    layers = overlays.read(ROOT / f"examples/{name}/params/cpu.yaml"), COMMON, SMALL[name], own
    flat = functools.reduce(overlays.stack, map(overlays.flatten, layers))
    (folder / "small.yaml").write_text(json.dumps({"preset": "", **flat}))  # JSON is YAML
    return folder / "small.yaml"


def execute(notebook: str, folder: Path, *arguments) -> dict:
    """Run a notebook headless; its report."""
    command = ["upsnb", "run", notebook, *arguments, "-o", folder]
    found = subprocess.run([sys.executable, "-m", *map(str, command)], cwd=ROOT, capture_output=True, text=True)
    assert found.returncode == 0, found.stdout[-2000:] + found.stderr[-2000:]
    return json.loads((folder / runfolder.REPORT).read_text())


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [*(pytest.param(name, marks=pytest.mark.long) for name in ("affinity", "long_context")), "mmdit"]
)
def test_it_runs_to_its_end_and_leaves_its_figures(name, tmp_path):
    execute(f"examples/{name}/{name}.ipynb", tmp_path / "run", "-f", small_file(name, tmp_path))
    assert len(list((tmp_path / "run" / "figures").glob("*.png"))) >= FIGURES[name]
    assert handle.Run.attach(tmp_path / "run").status() == "finished"


@pytest.mark.long
@pytest.mark.parametrize("name", SMALL)
def test_its_phases_are_measured_by_the_notebook_for_fields_and_its_error_has_its_name(name, tmp_path):
    short = {"chosen": ["activation_checkpointing"], "rounds": 2, "block_s": 1.0, "search_minutes": 0.0}
    short["quality_epochs"] = 1
    words = [word for key, value in short.items() for word in ("-p", f"{key}={json.dumps(value)}")]
    words += ["-p", f"preset={small_file(name, tmp_path)}"]
    report = execute("notebooks/04_phases.ipynb", tmp_path / "run", *words)
    (row,) = report["alone"]
    assert row["ratio"]["median"] > 0 and row["nrmse_ratio"] > 0
    _, metric, _ = WORDS[name]
    assert report["metric"] == metric
    shown = (tmp_path / "run/notebook.ipynb").read_text()
    assert f"{metric} ratio" in shown and "nRMSE" not in shown


@pytest.mark.long
@pytest.mark.parametrize("name", SMALL)
def test_its_steps_are_profiled_by_the_notebook_for_fields(name, tmp_path):
    words = ("-p", f"preset={small_file(name, tmp_path)}", "-p", "warm_up_s=2.0")
    report = execute("notebooks/08_profile.ipynb", tmp_path / "run", *words)
    assert sum(report["shares"].values()) == pytest.approx(1) and report["shares"]["backward"] > 0.1
    assert report["flops_per_step"] > 0 and report["findings"]


@pytest.mark.long
@pytest.mark.parametrize("name", SMALL)
def test_four_ranks_train_it(name, tmp_path):
    overlay = {"training.num_gpus": 4, "training.batch_size": 2, "stages.operator.epochs": 1}
    run = handle.start(overlays.load(small_file(name, tmp_path), overrides=overlay), tmp_path / "run")
    assert run.wait() == "finished", run.cause()
    assert run.events(("start",))[0]["num_ranks"] == 4 and run.events(("eval",))


@pytest.mark.parametrize("name", SMALL)
def test_a_microbatch_of_it_that_does_not_fit_is_halved_and_training_goes_on(name, tmp_path, train_here, monkeypatch):
    overlay = {"guards.out_of_memory": True, "training.batch_size": 8, "training.time_limit_s": None}
    config = overlays.load(small_file(name, tmp_path), overrides={**overlay, "stages.operator.epochs": 1})
    config, _ = phases.skip_missing(config, hardware.detect())  # not every CPU has bfloat16
    real = Objective.forward

    def forward(self, batch, *rest):
        if len(next(iter(batch.tensors().values()))) > 4:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return real(self, batch, *rest)

    monkeypatch.setattr(Objective, "forward", forward)
    workload.of(config).prepare(ROOT, print)
    events = train_here(config, tmp_path / "run")
    (act,) = (event for event in events if event["kind"] == "guard")
    assert act["action"] == "shrink" and act["step"] == 0
    assert [event for event in events if event["kind"] == "step"] and events[-1]["kind"] == "end"


@pytest.mark.parametrize("path", PARAMS, ids=lambda path: f"{path.parts[-3]}-{path.stem}")
def test_a_params_file_is_of_its_example_and_runs_here_or_says_why_not(path):
    config, example = overlays.load(path), path.parts[-3]
    assert all(all(problem[:3]) for problem in hardware.problems(config, hardware.detect()))
    assert config.data.workload == SMALL[example]["workload"]
    made = workload.of(config)
    if path.stem == "cpu":
        made.objective(made.outlines(ROOT), "operator", None)


@pytest.mark.parametrize("name", SMALL)
def test_a_run_speaks_of_its_own_unit_and_error_and_draws_its_figures(finished, name):
    run, (unit, metric, own), lines = finished(name), WORDS[name], []
    progress = Progress(lines.append)
    for event in run.events():
        progress(event)
    report = results.train_report(run)
    said = "\n".join([*lines, results.costs(report), *results.table(report).columns, *results.unmet(report)])
    assert f"{unit}/s" in said and f"validation {metric}" in said and f" {unit} a step" in said
    assert "samples/s" not in said and "nRMSE" not in said and metric in results.table(report)
    drawn = figures.RunFigures.of(run).all()
    assert set(drawn) == {"loss", "throughput", *own}
    for key, draw in drawn.items():
        figure = draw()
        text = " ".join(label.get_text() for label in figure.findobj(lambda artist: hasattr(artist, "get_text")))
        assert "nRMSE" not in text and "samples/s" not in text and len(figure.png) > 5000, key


@pytest.mark.parametrize("name", SMALL)
def test_a_share_of_nothing_is_held_out_and_evaluated_as_nothing(config, train_here, tmp_path):
    chosen = config(**{"data.split.validation_fraction": 0.0})
    events = train_here(chosen, tmp_path / "run")
    assert events[-1]["kind"] == "end" and events[-1]["reason"] == "epochs"
    for dataset in workload.of(chosen).open(ROOT, print).values():
        assert not len(dataset.splits["validation"]) and len(dataset.splits["test"])


@pytest.mark.parametrize("name", SMALL)
def test_killed_and_continued_a_run_ends_with_the_same_weights(config, killed_and_continued, tmp_path):
    overlay = {"checkpoint.interval": 3, "training.ema_decay": 0.9, "training.inverse_loss_frequency": 2}
    folders = killed_and_continued(config(**overlay), tmp_path, 5)
    there, again = (checkpoint.load(folder)["setup"] for folder in folders)
    for ours, theirs in ((there["model"], again["model"]), (there["ema"]["average"], again["ema"]["average"])):
        assert all(torch.equal(value, theirs[key]) for key, value in ours.items())
    curves = ({e["step"]: e["loss"] for e in runfolder.read_events(folder, ("step",))} for folder in folders)
    assert next(curves) == next(curves)


@pytest.mark.parametrize("overlay", [{}, {**RECOMPUTED, "training.accum_steps": 3}], ids=["plain", "recomputed"])
@pytest.mark.parametrize("name", SMALL)
def test_memory_of_a_step_is_predicted_within_five_percent(config, name, overlay):
    chosen = config(**LARGER[name], **overlay)
    predicted, measured = predict(chosen, Path()), measure.measure(chosen, Path())
    assert predicted.nbytes == pytest.approx(measured.nbytes, rel=0.05)
    assert predicted.account.by_kind()["parameters"] == measured.account.by_kind()["parameters"]


@pytest.mark.parametrize("phase", HOT, ids=lambda phase: phase.name)
@pytest.mark.parametrize("name", SMALL)
def test_phases_flip_live_and_back(setup, name, phase):
    """Compiled code is another test's."""
    live = setup(**{"data.workload_settings.contrastive": 0.02} if name == "affinity" else {})  # rarer, it weighs more
    if phases.unmet(phase, live.config, hardware.detect()):
        pytest.skip("not here")
    before, batches = live.config, live.loader.peek() * 2
    weights = {key: value.clone() for key, value in live.model.state_dict().items()}

    def stepped() -> tuple[torch.Tensor, torch.Tensor]:
        live.model.load_state_dict(weights)
        live.generator.manual_seed(0)
        loss, _, norm = live.step(batches, 0)
        return loss, norm

    plain = stepped()
    if (name, phase.name) == ("mmdit", "loss_frequency"):  # all of its loss is computed every time, at every pixel
        with pytest.raises(ConfigError, match="MMDiT predicts on its grid only -> empty num_queries"):
            live.update(overlays.apply(before, phase.on))
        return
    live.update(overlays.apply(before, phase.on))
    loss, norm = stepped()
    tolerance = {"identical": 1e-6, "rounding": 0.02, "different": 0.2}[phase.numerics]
    assert float(loss) == pytest.approx(float(plain[0]), rel=tolerance)
    assert float(norm) == pytest.approx(float(plain[1]), rel=20 * tolerance)
    live.update(before)
    assert all(map(torch.equal, stepped(), plain))


@pytest.mark.parametrize(("name", "kernel"), [*((name, "math") for name in SMALL), ("mmdit", "flash")])
def test_recomputed_or_with_another_kernel_the_gradients_are_the_same(setup, perturb, kernel):
    grads = []
    for made in (setup(), setup(**RECOMPUTED, **{"operator.pdet.attention": kernel})):
        perturb(made.model)
        made.generator.manual_seed(0)
        made.objective(made.loader.peek()[0], made.objective.weights(0, 0), None)[0].backward()
        grads.append([parameter.grad for parameter in made.model.parameters()])
    for mine, theirs in zip(*grads):
        torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "sharded", "tolerance"),
    [
        ("long_context", False, 0.02),  # each rank's mean is over its own tokens
        pytest.param("long_context", True, 0.02, marks=pytest.mark.long),
        pytest.param("affinity", False, 1e-3, marks=pytest.mark.long),
        pytest.param("mmdit", False, None, marks=pytest.mark.long),  # each rank draws its own noise
    ],
)
def test_two_ranks_train_one_model_and_share_the_evaluation(config, name, sharded, tolerance, tmp_path):
    """But for the contrastive loss of affinities, whose counter-examples are those of a rank's microbatch."""
    own, score = {"optimizer.name": "adamw"}, "flow" if name == "mmdit" else "error"
    if name == "affinity":
        own["data.workload_settings.contrastive"] = 0
    curves, found = [], []
    for ranks in (1, 2):
        several = {"training.num_gpus": ranks, "training.batch_size": 8 // ranks}
        overlay = {**own, **several, "training.use_fsdp2": sharded and ranks > 1}
        run = handle.start(config(**overlay), tmp_path / str(ranks))
        assert run.wait() == "finished", run.cause()
        curves.append([event["loss"] for event in run.events(("step",))])
        found.append(next(iter(figures.read_evaluation(run.folder, run.events())["datasets"].values()))["test"])
    assert tolerance is None or curves[0] == pytest.approx(curves[1], rel=tolerance)
    assert found[0]["per_sample"]["samples"] == found[1]["per_sample"]["samples"]
    assert found[0][score] == pytest.approx(found[1][score], rel=0.1)
