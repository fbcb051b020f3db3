"""Profiles of live runs: where a step goes, what it is worth, and what the sentences about it name."""

import json
import math

import pytest
import torch
from figure_checks import check
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from upsnb import hardware, overlays, phases, spans
from upsnb.errors import RunError
from upsnb.models.transformer import attend
from upsnb.profile import figures, flops, recorder, report, trace
from upsnb.runs import handle, runfolder
from upsnb.training import optimizers

INVERSE = {"training.lambda_inv_enc": 0.1, "training.lambda_inv_dec": 0.1}
SHALLOW = {"operator.pdet.depth": 1}  # counting takes as long as there are operators


@pytest.fixture(autouse=True)
def few_steps(monkeypatch):
    monkeypatch.setattr(recorder, "TIMED_STEPS", 4)
    monkeypatch.setattr(recorder, "TRACED_STEPS", 2)
    monkeypatch.setattr(flops, "SIZES", {"cpu": (128,)})
    monkeypatch.setattr(flops, "COPIED", 1000)


class Work(TorchDispatchMode):
    """On the clock every operator takes a millisecond: times are work, and the same on every machine."""

    def __init__(self, clock):
        super().__init__()
        self.clock = clock

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        self.clock.advance(1e-3)
        return function(*arguments, **(options or {}))


@pytest.fixture
def profiled(tiny_config, train_here, tmp_path):
    """`profiled(**overlay)`: the folder of a run that was asked for a profile at its third step, and its record."""

    def take(name="run", at_step=lambda step: None, last=16, **overlay):
        folder, asked = tmp_path / name, []

        def ask(step):
            if step == 3 and not asked:
                asked.append(handle.Run(folder).profile())
            if step == last:
                handle.Run(folder).stop()
            at_step(step)

        train_here(tiny_config(names=("advection",), **{"evaluation.rollout": False, **overlay}), folder, ask)
        (event,) = runfolder.read_events(folder, ("profile",))
        assert event["revision"] == asked[0] and event["reason"] is None
        return folder, json.loads((folder / recorder.profile_name(0)).read_text())

    return take


def test_shares_add_up_to_the_steps_that_were_timed(profiled, clock):
    with Work(clock):
        folder, record = profiled(**INVERSE)
    steps = {event["step"]: event for event in runfolder.read_events(folder, ("step",))}
    first, count = record["first_step"], record["num_steps"]["timed"]
    logged_ms = sum(steps[first + 1 + number]["step_time_ms"] for number in range(count)) / count
    parts = report.partition(record)
    assert sum(parts.values()) == pytest.approx(record["step_ms"], rel=1e-6)
    # the clock of step events ends within a step, a profile's at its boundary: over several steps they agree
    assert record["step_ms"] == pytest.approx(logged_ms, rel=0.02)
    assert all(value >= 0 for value in parts.values())
    assert min(parts[name] for name in ("forward", "inverse losses", "backward", "optimizer")) > 0


def test_profiled_steps_change_no_weight(profiled, tiny_setup, tmp_path):
    folder, _ = profiled(last=13, **{"optimizer.name": "adamw"})
    setup = tiny_setup(names=("advection",), **{"optimizer.name": "adamw"})
    batches = setup.loader.epoch(0)
    logged = [event["loss"] for event in runfolder.read_events(folder, ("step",))]
    rates = [event["learning_rate"] for event in runfolder.read_events(folder, ("step",))]
    for step, (loss, rate) in enumerate(zip(logged, rates)):
        optimizers.set_learning_rate(setup.optimizers, rate / setup.config.optimizer.lr)
        assert setup.step([next(batches)], step)[0].item() == loss
    assert spans._Current.recorder is None


def test_traced_steps_are_not_steady_and_timed_ones_are(profiled):
    folder, record = profiled(last=20)
    steady = {event["step"]: event["steady"] for event in runfolder.read_events(folder, ("step",))}
    traced_from = record["first_step"] + record["num_steps"]["timed"]
    traced = range(traced_from + 1, traced_from + 1 + recorder.WARMUP_STEPS + record["num_steps"]["traced"])
    assert not any(steady[step] for step in traced)
    assert any(steady[step] for step in steady if step > traced[-1] + 5)


def test_slow_reading_shows_as_data_wait(profiled, slow_reading):
    slow_reading(0.05)
    _, record = profiled()
    assert record["parts_ms"]["data wait"] == pytest.approx(50, abs=1)
    assert record["parts_ms"]["copy"] == 0  # all data is resident


def test_pauses_and_checkpoints_are_no_part_of_a_step(profiled, monkeypatch, clock):
    from upsnb.training.checkpoint import Saver

    save = Saver.save
    monkeypatch.setattr(Saver, "save", lambda *a, **k: (clock.advance(0.1), save(*a, **k))[1])
    _, record = profiled(**{"checkpoint.interval": 1})
    assert record["parts_ms"]["other"] < 50


@pytest.mark.slow
def test_more_inverse_losses_take_more_of_a_step(profiled, clock):
    shares = []
    for frequency in (4, 1):
        with Work(clock):
            _, record = profiled(f"every {frequency}", **INVERSE, **{"training.inverse_loss_frequency": frequency})
        parts = report.partition(record)
        shares.append(parts["inverse losses"] / sum(parts.values()))
        assert record["trace"]["inverse_backward_ms"] > 0
    assert shares[1] > 1.5 * shares[0]


def test_a_flip_makes_a_profile_begin_anew(profiled, tmp_path):
    def flip(step):
        if step == 5:
            handle.Run(tmp_path / "run").update({"training.lambda_field": 0.1})

    _, record = profiled(at_step=flip)
    (answered,) = runfolder.read_events(tmp_path / "run", ("flip",))
    assert record["first_step"] >= answered["step"]


def test_a_run_that_ends_first_leaves_nothing_recording(tiny_config, train_here, tmp_path):
    def ask(step):
        run = handle.Run(tmp_path)
        if step == 2:
            run.profile()
        if step == 4:
            run.stop()

    train_here(tiny_config(), tmp_path, ask)
    assert not runfolder.read_events(tmp_path, ("profile",))
    assert spans._Current.recorder is None


def test_a_run_that_cannot_be_profiled_says_why_at_once(tiny_config, tmp_path):
    runfolder.create(tiny_config(), tmp_path)
    run = handle.Run(tmp_path)
    run.pause()
    with pytest.raises(RunError, match="is paused .* -> run.resume"):
        report.take(run)
    run.resume()
    runfolder.update_manifest(tmp_path, status="finished")
    with pytest.raises(RunError, match="finished before its profile event -> profile a longer run"):
        report.take(run)


# -- counting ----------------------------------------------------------------------------------------------------------


def test_operations_of_a_linear_layer_are_those_counted_by_hand():
    layer, x = nn.Linear(24, 40, bias=False), torch.randn(16, 24, requires_grad=True)
    one = 2 * 16 * 24 * 40  # forward; backward has two products of the same size
    assert flops.count(lambda: layer(x).sum()) == 3 * one


def test_bytes_of_products_are_those_counted_by_hand_without_attention_s_scores():
    layer, x = nn.Linear(24, 40, bias=False), torch.randn(16, 24, requires_grad=True)
    one = 4 * (16 * 24 + 24 * 40 + 16 * 40)  # two operands and a result; backward has two products of the same three
    assert flops.count_bytes(lambda: layer(x).relu().sum()) == 3 * one
    q, k, v = (torch.randn(1, 1, 64, 8, requires_grad=True) for _ in range(3))
    scores = 4 * 64 * 64
    assert flops.count_bytes(lambda: nn.functional.scaled_dot_product_attention(q, k, v).square().sum()) < 2 * scores


@pytest.mark.parametrize("tokens", [(16, 16), (8, 24)])
def test_attention_is_counted_wherever_a_model_calls_it_as_if_it_were_written_out(tokens):
    """Torch has no formula of the kernel that a CPU takes, and everything is counted on one."""
    q, k, v = (torch.randn(2, 3, count, 8, requires_grad=True) for count in (*tokens, tokens[1]))
    product = 2 * 2 * 3 * math.prod(tokens) * 8  # scores, and their mean of the values
    fused, written = (flops.count(lambda b=backend: attend(q, k, v, b).sum()) for backend in ("sdpa", "math"))
    assert fused == written == (2 + 4) * product


def test_operations_grow_with_the_batch_and_not_with_how_a_step_is_carried_out(tiny_setup):
    setup = tiny_setup(**INVERSE, **SHALLOW)
    base = flops.per_microbatch(setup.config, setup.datasets)
    larger = []
    for size in (12, 16):
        other = tiny_setup(**INVERSE, **SHALLOW, **{"training.batch_size": size})
        larger.append(flops.per_microbatch(other.config, other.datasets))
    for name, count in base.items():  # on a line that begins a little above zero: the decoder's basis is made once
        assert larger[1][name] - larger[0][name] == larger[0][name] - count
        assert 1.9 < larger[1][name] / count <= 2
    other = tiny_setup(
        **INVERSE,
        **SHALLOW,
        **{"operator.pdet.use_activation_checkpoint": True, "operator.pdet.attention": "math", "training.amp": False},
    )
    assert flops.per_microbatch(other.config, other.datasets) == base


def test_a_turn_of_the_losses_is_counted_at_its_mean(tiny_setup):
    counts = {}
    for frequency in (1, 2, 4):
        setup = tiny_setup(("advection",), **INVERSE, **{"training.inverse_loss_frequency": frequency})
        counts[frequency] = flops.per_microbatch(setup.config, setup.datasets)["advection"]
    without = 2 * counts[2] - counts[1]
    assert counts[4] == pytest.approx(without + (counts[1] - without) / 4)
    assert without < counts[1]


def test_operations_and_peak_of_a_profile_are_in_the_same_unit(profiled, tiny_setup, clock):
    with Work(clock):
        _, record = profiled(**SHALLOW)
    setup = tiny_setup(("advection",), **SHALLOW)
    assert record["flops_per_step"] == flops.per_microbatch(setup.config, setup.datasets)["advection"]
    floor, peak = report.floor([record], record["matrix_peak"]["tflops"]), record["matrix_peak"]
    assert floor["bandwidth_gb_per_s"] * 1e9 == pytest.approx(2 * 4 * flops.COPIED / 1e-3, rel=0.01)
    moved = flops.per_microbatch(setup.config, setup.datasets, nbytes=True)["advection"]
    state = 2 * record["state_gib"] + record["gradients_gib"]
    assert floor["nbytes"] == pytest.approx(moved + state * 2**30) and state > 0
    assert floor["ms"] == pytest.approx(1e3 * record["flops_per_step"] / (peak["tflops"] * 1e12) + floor["bytes_ms"])
    assert (peak["size"], peak["dtype"]) == (128, "float32")
    assert peak["tflops"] * 1e12 == pytest.approx(2 * 128**3 / 1e-3, rel=0.01)  # a product a millisecond


# -- traces ------------------------------------------------------------------------------------------------------------


def event(name, ts, dur, cat="cpu_op", tid=1, **args):
    return {"ph": "X", "name": name, "ts": ts, "dur": dur, "cat": cat, "tid": tid, "args": args}


def written(path, *events):
    import gzip

    with gzip.open(path, "wt") as file:
        json.dump({"traceEvents": events}, file)
    return path


def test_hidden_communication_is_not_counted_as_exposed(tmp_path):
    path = written(
        tmp_path / "trace.json.gz",
        event("upsnb/backward", 0, 10_000, "user_annotation"),
        event("aten::mm", 0, 4000),
        event("aten::mm", 6000, 2000),
        event("gloo:all_reduce", 3000, 4000, "user_annotation", tid=2),  # 1 ms under each product, 2 ms alone
    )
    found = trace.read(path, num_steps=1)
    assert found["parts"]["backward"] == {"range_ms": 10, "busy_ms": 6, "communication_ms": 2}
    assert found["communication_ms"] == 4 and found["collectives"] == {"all_reduce": {"calls": 1, "ms": 4}}


def test_an_operator_that_waits_for_a_collective_does_not_compute(tmp_path):
    path = written(
        tmp_path / "trace.json.gz",
        event("upsnb/optimizer", 0, 10_000, "user_annotation"),
        event("aten::mm", 1000, 8000),  # of sharded tensors
        event("_c10d_functional::wait_tensor", 2000, 5000),
        event("aten::mm", 7000, 1000),
        event("gloo:all_gather", 2000, 5000, "user_annotation", tid=2),
    )
    assert trace.read(path, 1)["parts"]["optimizer"] == {"range_ms": 10, "busy_ms": 1, "communication_ms": 5}


def test_kernels_belong_to_the_loss_whose_node_launched_them(tmp_path):
    node = "autograd::engine::evaluate_function: MmBackward0"
    path = written(
        tmp_path / "trace.json.gz",
        event("upsnb/inverse losses", 0, 1000, "user_annotation"),
        event("aten::mm", 100, 200, **{"Sequence number": 7}),
        event("upsnb/forward", 1000, 1000, "user_annotation"),
        event("aten::mm", 1100, 200, **{"Sequence number": 8}),
        event("upsnb/backward", 2000, 8000, "user_annotation"),
        event(node, 2100, 300, tid=9, **{"Sequence number": 8}),
        event(node, 2500, 300, tid=9, **{"Sequence number": 7}),
        event("cudaLaunchKernel", 2200, 10, "cuda_runtime", tid=9, correlation=1),
        event("cudaLaunchKernel", 2600, 10, "cuda_runtime", tid=9, correlation=2),
        event("gemm", 3000, 2000, "kernel", tid=70, correlation=1),
        event("gemm", 5000, 3000, "kernel", tid=70, correlation=2),
        event("ncclDevKernel_AllReduce_Sum_f32(x)", 7000, 2500, "kernel", tid=71, correlation=3),
    )
    found = trace.read(path, num_steps=1)
    assert found["inverse_backward_ms"] == 3
    assert found["parts"]["backward"] == {"range_ms": 8, "busy_ms": 5, "communication_ms": 1.5}
    assert found["num_launches"] == 2


# -- sentences ---------------------------------------------------------------------------------------------------------


def made(**shares):
    """A report with these shares, the rest of the step in forward and backward."""
    left = (1 - sum(shares.values())) / 2
    return {
        "shares": {**dict.fromkeys(report.SHARES, 0.0), "forward": left, "backward": left, **shares},
        "inverse_share_of_forward": 0.58,
        "mfu": 0.5,
        "matrix_peak": {"dtype": "float32"},
        "peak_memory_gib": 1.0,
        "device_memory_gib": 10.0,
    }


@pytest.mark.parametrize(
    ("share", "phase"),
    [
        ("inverse losses", "loss_frequency"),
        ("launch gaps", "compile"),
        ("data wait", "data_loading"),
        ("copy", "data_loading"),
    ],
)
def test_findings_name_the_phase_that_addresses_them(tiny_config, share, phase):
    config = tiny_config(**INVERSE)
    (row,) = report.findings(made(**{share: 0.4}), config, hardware.detect())
    assert row["phase"] == phase and row["share"] == 0.4
    assert row["sentence"].endswith(f"-> phase {phases.BY_NAME[phase].number}, {phase}")


def test_findings_do_not_advise_what_is_on_or_cannot_run_or_does_not_apply(tiny_config):
    config = tiny_config(**{"training.compile": True})
    (row,) = report.findings(made(**{"launch gaps": 0.3}), config, hardware.detect())
    assert row["phase"] is None and row["sentence"].endswith("; phase 1, compile (on already)")
    cpu = hardware.Hardware("cpu", 1, "a processor", 16.0, 4)
    (row,) = report.findings(made(communication=0.3), config, cpu)
    assert row["phase"] is None and "NCCL speaks between CUDA devices and this run is on the CPU)" in row["sentence"]
    (row,) = report.findings(made(optimizer=0.3), config, cpu)
    assert row["phase"] == "fused"
    both = tiny_config(**{"optimizer.foreach": True})
    (row,) = report.findings(made(optimizer=0.3), both, cpu)
    assert row["phase"] is None and "AdamW is either fused or foreach" in row["sentence"]
    assert report.findings(made(optimizer=0.04), config, cpu) == []
    verdicts = {"loss_frequency": phases.Verdict(phases.DOES_NOT_APPLY, "FNO predicts on its grid only")}
    (row,) = report.findings(made(**{"inverse losses": 0.4}), tiny_config(**INVERSE), cpu, verdicts)
    assert row["phase"] is None
    assert row["sentence"].endswith("loss_frequency (does not apply: FNO predicts on its grid only)")


@pytest.mark.parametrize(
    ("settings", "advised"), [({}, False), ({"compile": True}, True), ({"compile": True, "use_fsdp2": True}, False)]
)
def test_cuda_graphs_are_advised_where_compiled_code_on_a_gpu_still_waits_for_launches(tiny_config, settings, advised):
    training = {f"training.{name}": value for name, value in settings.items()}
    gpu = hardware.Hardware("cuda", 1, "a GPU", 80.0, 4, compute_capability=(9, 0))
    gaps, config = made(**{"launch gaps": 0.4}), tiny_config(**training)
    (on_gpu,) = report.findings(gaps, overlays.apply(config, {"training.device": "auto"}), gpu)
    (on_cpu,) = report.findings(gaps, config, gpu)
    assert ("CUDA graphs" in on_gpu["sentence"], "CUDA graphs" in on_cpu["sentence"]) == (advised, False)


def test_bytes_follow_from_what_each_wrapper_sends(tiny_config):
    parameters = {"operator": 1000, "codecs": {"advection": 100, "darcy": 300}}
    ddp = tiny_config(**{"training.num_gpus": 4, "training.accum_steps": 3})
    assert report.bytes_per_step(parameters, ddp, 4) == 2 * 0.75 * 4 * 1400
    assert report.bytes_per_step(parameters, ddp, 1) == 0
    halved = tiny_config(**{"training.num_gpus": 4, "training.accum_steps": 3, "training.bf16_gradients": True})
    assert report.bytes_per_step(parameters, halved, 4) == 0.75 * 4 * 1400
    sharded = tiny_config(**{"training.num_gpus": 4, "training.accum_steps": 3, "training.use_fsdp2": True})
    assert report.bytes_per_step(parameters, sharded, 4) == 0.75 * (3 * 2 * 4 * 1200 + 4 * 1400)
    mixed = overlays.apply(sharded, {"training.amp": True, "training.amp_dtype": "bfloat16"})
    cast = 3 * 2 * (2 * 900 + 4 * 300)  # blocks in half as many bytes, what is around them as it is
    assert report.bytes_per_step({**parameters, "blocks": 900}, mixed, 4) == 0.75 * (cast + 4 * 1400)
    unrolled = overlays.apply(sharded, {"stages.finetune.epochs": 1, "stages.finetune.unroll": 5})
    assert report.bytes_per_step(parameters, unrolled, 4, "finetune") == 0.75 * (5 * 3 * 2 * 4 * 1200 + 4 * 1400)
    assert report.bytes_per_step(parameters, unrolled, 4) == report.bytes_per_step(parameters, sharded, 4)


def test_what_a_second_rank_would_send_is_of_the_stage_that_was_profiled(tiny_config):
    ranks = [{"parameters": {"operator": 10**9, "codecs": {"advection": 0}}}]
    sharded = tiny_config(**{"training.num_gpus": 4, "training.use_fsdp2": True})
    config = overlays.apply(sharded, {"stages.finetune.epochs": 1, "stages.finetune.unroll": 5})
    told = {**made(), "step_ms": 100.0, "device": "cuda"}
    once, unrolled = (report._more_ranks(told, ranks, config, stage)["answer"] for stage in ("operator", "finetune"))
    sent = report.bytes_per_step(ranks[0]["parameters"], config, 2, "finetune")
    assert f"would send {sent / 1e6:.3g} MB" in unrolled and once != unrolled


def test_the_kept_profile_can_be_drawn_again_on_one_rank_and_on_two():
    made = json.loads((runfolder.project_root() / "outputs/reference/profile/report.json").read_text())
    two = {**made, "num_ranks": 2, "shares_by_rank": [made["shares"], made["shares"]]}
    for figure in (figures.where_a_step_goes(made), figures.where_a_step_goes(two), figures.start_up(made)):
        check(figure)
