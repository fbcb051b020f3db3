"""Guards: what a run does by itself when training goes wrong, by injected failures and by the events it leaves."""

import math

import pytest
import torch
from guarded import batches, state_of
from made_runs import fields, of

from upsnb import config as configs
from upsnb import overlays
from upsnb.errors import ConfigError, RunError
from upsnb.runs import runfolder
from upsnb.training.fields import Fields
from upsnb.training.losses import UPSObjective
from upsnb.training.parallel import Ranks
from upsnb.training.setup import Setup
from upsnb.training.trained import load_model
from upsnb.worker import flips, guard_policies, guards
from upsnb.worker.guard_policies import OFFLOAD, OffloadTrial

# -- nonfinite -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("amp", [None, "bfloat16", "float16"])
def test_a_step_without_a_finite_loss_changes_no_weight_moment_or_average(tiny_setup, spoil, bad, amp):
    overlay = {"training.amp": amp is not None, "training.amp_dtype": amp or "float32"}
    setup = tiny_setup(**overlay, **{"guards.nonfinite": "stop", "training.ema_decay": 0.99})
    spoil(lambda call, total: total * bad if call == 3 else total)
    setup.step(batches(setup), 0)
    before = state_of(setup)
    setup.step(batches(setup), 1)
    assert setup.skipped == "loss"
    after = state_of(setup)
    assert before.keys() == after.keys()
    assert all(torch.equal(before[key], after[key]) for key in before)
    setup.step(batches(setup), 2)
    assert not setup.skipped
    assert any(not torch.equal(before[key], value) for key, value in state_of(setup).items())


def test_an_infinite_gradient_under_a_finite_loss_is_skipped_too(tiny_setup):
    setup = tiny_setup(**{"guards.nonfinite": "stop"})
    parameter = next(setup.model.parameters())
    hook = parameter.register_hook(lambda gradient: gradient * math.inf)
    before = state_of(setup)
    loss, _, _ = setup.step(batches(setup), 0)
    hook.remove()
    assert loss.isfinite() and setup.skipped == "gradient"
    assert all(torch.equal(before[key], value) for key, value in state_of(setup).items())


def test_overflows_that_the_scaler_searches_its_scale_with_are_no_failure(tiny_setup):
    setup = tiny_setup(
        **{"guards.nonfinite": "stop", "training.amp": True, "training.amp_dtype": "float16"},
    )
    setup.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127)
    reasons = []
    for step in range(4):
        setup.step(batches(setup), step)
        reasons.append(setup.skipped)
    assert set(reasons) == {"overflow"}
    assert setup.scaler.get_scale() == 2.0**123


def test_a_collapsed_scale_counts_as_failure(tiny_setup):
    setup = tiny_setup(**{"guards.nonfinite": "stop", "training.amp": True, "training.amp_dtype": "float16"})
    setup.scaler = torch.amp.GradScaler("cpu", init_scale=0.5)
    next(setup.model.parameters()).register_hook(lambda gradient: gradient * math.inf)
    setup.step(batches(setup), 0)
    assert setup.skipped == "gradient"


def test_float16_switches_to_bfloat16_after_patience_and_the_flip_carries_the_guards_revision(
    tiny_config, train_here, tmp_path, spoil
):
    overlay = {"guards.nonfinite": "bfloat16", "training.amp": True, "training.amp_dtype": "float16"}
    spoil(lambda call, total: total * math.nan if 4 <= call <= 6 else total)
    events = train_here(tiny_config(**overlay), tmp_path / "run")
    skips = of(events, "guard", action="skip")
    assert [skip["step"] for skip in skips] == [4, 5, 6] and [skip["in_a_row"] for skip in skips] == [1, 2, 3]
    (act,) = of(events, "guard", action="bfloat16")
    (flip,) = of(events, "flip")
    assert flip["revision"] == act["revision"] and flip["applied"] and flip["step"] == 6
    assert flip["changes"] == {"training.amp_dtype": "bfloat16"}
    assert of(events, "end") and all(math.isfinite(e["loss"]) for e in of(events, "step")[6:])


def test_a_lone_bad_step_ends_nothing(tiny_config, train_here, tmp_path, spoil):
    spoil(lambda call, total: total * math.nan if call % 3 else total)  # two in a row, patience is three
    events = train_here(tiny_config(**{"guards.nonfinite": "stop"}), tmp_path / "run")
    assert of(events, "end") and len(of(events, "guard", action="skip")) > 4 and not of(events, "guard", action="stop")


@pytest.mark.parametrize(
    ("overlay", "said"),
    [({"guards.nonfinite": "stop"}, "since step 3"), ({"guards.nonfinite": "bfloat16"}, "computes in float32 already")],
)
def test_stopping_names_step_term_and_advice_and_keeps_the_last_good_checkpoint(
    tiny_config, train_here, tmp_path, monkeypatch, overlay, said
):
    real = UPSObjective.forward

    def forward(self, batch, weights, amp_dtype):
        total, terms = real(self, batch, weights, amp_dtype)
        forward.calls += 1
        factor = math.nan if forward.calls >= 3 else 1.0
        return total * factor, {term: value * factor for term, value in terms.items()}

    forward.calls = 0
    monkeypatch.setattr(UPSObjective, "forward", forward)
    with pytest.raises(RunError, match="step 5: .*relative") as caught:
        train_here(tiny_config(**overlay, **{"checkpoint.interval": 2}), tmp_path / "run")
    assert said in str(caught.value) and "optimizer.lr" in str(caught.value)
    events = runfolder.read_events(tmp_path / "run")
    assert of(events, "guard", action="stop")[0]["step"] == 5
    assert all(p.isfinite().all() for p in load_model(tmp_path / "run").parameters())


def test_without_the_guard_a_step_does_not_wait_for_its_loss(tiny_setup, monkeypatch):
    setup = tiny_setup()
    monkeypatch.setattr(Setup, "_reason_to_skip", lambda *_: pytest.fail("read the loss inside the step"))
    setup.step(batches(setup), 0)
    assert setup.skipped == ""


# -- optimizer offload ---------------------------------------------------------------------------------------------


class Panel:
    """A guards' world without CUDA: a setup whose config obeys, and flips that measured what a test says."""

    stage = "operator"

    def __init__(self, folder, config):
        self.setup, self.config = self, config
        self.skipped, self.ranks, self.after, self.before = "", Ranks(), None, []
        self.folder = runfolder.create(config, folder)
        self.events = runfolder.EventWriter(folder)
        self.guards = guards.Guards(folder, self, self, self.ranks, self.events)
        self.step = 0

    def obey(self, **more):
        """Apply what control.json asks for, as a run does at a step boundary."""
        control, old = runfolder.read_control(self.folder), self.config
        changes = {**control.overlay, **more}
        self.config = old.model_copy(
            update={"training": old.training.model_copy(update={"cpu_offload_optimizer": changes[OFFLOAD]})}
        )
        self.events.write(
            "flip", self.step, revision=control.revision, applied=True, changes={OFFLOAD: changes[OFFLOAD]}
        )
        return control.revision

    def measure(self, revision, on, ratio, spread=0.01, **more):
        changes = {OFFLOAD: on, **more}
        ci = [ratio - spread, ratio + spread]
        told = fields("flip_effect", revision=revision, changes=changes, ratio=ratio, ci95=ci)
        self.events.write("flip_effect", self.step, **told)

    def after_step(self):
        self.step += 1
        self.guards.after_step(self.step, torch.tensor(1.0), {}, torch.tensor(1.0))
        return of(runfolder.read_events(self.folder), "guard")


@pytest.fixture
def panel(tmp_path):
    """`panel(on)`: a run with a limit of 10 %, offload on or off from the start."""

    def make(on: bool) -> Panel:
        overlay = {OFFLOAD: on, "training.grad_clip": None, "guards.offload_overhead": 0.1}
        return Panel(tmp_path / "run", overlays.resolve(overlay))

    return make


@pytest.mark.parametrize(("ratio", "acts"), [(0.8, ["off"]), (0.95, []), (1.2, []), (0.905, [])])
def test_offload_is_switched_off_where_its_whole_interval_is_above_the_limit(panel, ratio, acts):
    run = panel(False)
    runfolder.write_control(run.folder, {OFFLOAD: True})
    run.measure(run.obey(), True, ratio)
    assert [event["action"] for event in run.after_step()] == acts
    if acts:
        assert runfolder.read_control(run.folder).overlay == {OFFLOAD: False}


def test_a_flip_of_more_than_offload_says_nothing_about_offload(panel):
    run = panel(False)
    runfolder.write_control(run.folder, {OFFLOAD: True})
    run.measure(run.obey(), True, 0.5, **{"training.batch_size": 20})
    assert not run.after_step()


@pytest.mark.parametrize(("ratio", "end"), [(1.05, "on"), (1.5, "keep off")])
def test_offload_that_was_on_from_the_start_is_tried_without_once(panel, ratio, end):
    run = panel(True)
    assert not run.after_step(), "no window yet"
    run.before = [(8.0, 0.1)] * flips.WINDOW_STEPS
    (trial,) = run.after_step()
    assert trial["action"] == "trial" and trial["changes"] == {OFFLOAD: False}
    run.measure(run.obey(), False, ratio)
    assert [event["action"] for event in run.after_step()] == ["trial", end]
    run.obey()
    assert len(run.after_step()) == 2, "not tried again"
    assert run.config.training.cpu_offload_optimizer == (end == "on")


def test_a_trial_that_another_flip_interrupts_is_undone(panel):
    run = panel(True)
    run.before = [(8.0, 0.1)] * flips.WINDOW_STEPS
    run.after_step()
    revision = run.obey()
    run.events.write("flip", 3, revision=revision + 1, applied=True, changes={"optimizer.lr": 1e-4})
    assert run.after_step()[-1]["action"] == "on"
    assert OffloadTrial().is_due() and run.guards.offload.is_due()


def test_overhead_is_the_same_from_either_direction():
    on = {"kind": "flip_effect", "changes": {OFFLOAD: True}, "ratio": 0.8, "ci95": [0.75, 0.85]}
    off = {"kind": "flip_effect", "changes": {OFFLOAD: False}, "ratio": 1.25, "ci95": [1 / 0.85, 1 / 0.75]}
    assert guard_policies.overhead(on) == pytest.approx(guard_policies.overhead(off))
    assert guard_policies.overhead(on) == pytest.approx((0.25, 0.1765, 1 / 3), abs=1e-4)


# -- validation against a reference --------------------------------------------------------------------------------

PHASE_3 = {"training.inverse_loss_frequency": 4, "training.query_sampling.num_queries": 1024}
COMPARED = {"stages.operator.epochs": 2, "training.lambda_inv_enc": 0.1}


def reference(folder, config, *curve):
    """A run folder with these validations after epochs 1, 3, 5, ..."""
    folder.mkdir()
    configs.save(config, folder / "config.yaml")
    events = runfolder.EventWriter(folder)
    for number, value in enumerate(curve):
        scores = {"advection": value, "darcy": value}
        events.write("eval", number, **fields("eval", epoch=2 * number + 1, val_nrmse=scores))
    events.close()
    return {"guards.validation_reference": str(folder)}


def test_falling_behind_the_reference_switches_phase_3_off_once(tiny_config, train_here, tmp_path):
    overlay = {**COMPARED, **PHASE_3, **reference(tmp_path / "a", tiny_config(**COMPARED), 1e-6, 1e-6)}
    events = train_here(tiny_config(**overlay), tmp_path / "run")
    (act,), (flip,) = of(events, "guard"), of(events, "flip")
    assert act["action"] == "off" and act["epoch"] == 1 and act["revision"] == flip["revision"]
    assert flip["phases"] == {"loss_frequency": False}


def test_keeping_up_with_the_reference_changes_nothing(tiny_config, train_here, tmp_path):
    overlay = {**COMPARED, **PHASE_3, **reference(tmp_path / "a", tiny_config(**COMPARED), 1e6, 1e6)}
    assert not of(train_here(tiny_config(**overlay), tmp_path / "run"), "guard")


def test_falling_behind_without_phase_3_is_one_warning(tiny_config, train_here, tmp_path):
    overlay = {**COMPARED, **reference(tmp_path / "a", tiny_config(**COMPARED), 1e-6, 1e-6)}
    events = train_here(tiny_config(**overlay), tmp_path / "run")
    (act,) = of(events, "guard")
    assert act["action"] == "warning" and act["revision"] is None and not of(events, "flip")


def test_falling_behind_is_told_by_the_name_of_the_workload_s_error(tmp_path, monkeypatch):
    monkeypatch.setattr(Fields, "metric", "perplexity")
    overlay = reference(tmp_path / "a", overlays.resolve({}), 1e-6)
    behind = Panel(tmp_path / "run", overlays.resolve(overlay))
    behind.guards.validated(1, 10, {"darcy": 1.0})
    (act,) = of(runfolder.read_events(behind.folder), "guard")
    assert act["reason"].startswith("validation perplexity after epoch 1 is more than ")


def test_the_reference_is_read_between_its_validations_and_not_beyond(tiny_config, tmp_path):
    overlay = reference(tmp_path / "a", tiny_config(), 1.0, 0.5)
    curve = guard_policies.Reference(overlay["guards.validation_reference"], tiny_config())
    assert curve.at("darcy", 2) == pytest.approx(0.75)
    assert curve.at("darcy", 4) is None and curve.at("darcy", 0.5) is None and curve.at("burgers", 2) is None
    later = guard_policies.Reference(overlay["guards.validation_reference"], tiny_config(), "finetune")
    assert later.at("darcy", 2) is None, "epochs of another stage are no epochs of this one"


@pytest.mark.parametrize("what", ["missing", "empty", "other data"])
def test_a_reference_that_cannot_serve_is_an_error_at_the_start(tiny_config, train_here, tmp_path, what):
    overlay = {"guards.validation_reference": str(tmp_path / "a")}
    if what != "missing":
        theirs = tiny_config(**{"data.split.test_fraction": 0.2} if what == "other data" else {})
        reference(tmp_path / "a", theirs, *([] if what == "empty" else [1.0]))
    with pytest.raises(ConfigError, match="validation_reference.*a "):
        train_here(tiny_config(**overlay), tmp_path / "run")
    assert not of(runfolder.read_events(tmp_path / "run"), "step")
