"""What only a GPU can show: mixed precision, compiled steps, pinned copies, allocator peaks, NCCL."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from upsnb import overlays
from upsnb.data.batches import Loader
from upsnb.memory import measure, predict
from upsnb.models import chosen
from upsnb.profile import report
from upsnb.runs import handle, runfolder
from upsnb.runs.ranks import allocator_environment
from upsnb.training import checkpoint, evaluation, parallel
from upsnb.training.compiling import CompileCounter
from upsnb.training.parallel import Ranks
from upsnb.training.setup import Setup
from upsnb.worker import telemetry

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
CUDA = {"training.device": "cuda"}
BF16 = {"training.amp": True, "training.amp_dtype": "bfloat16"}
OFFLOAD = {"training.cpu_offload_optimizer": True, "training.grad_clip": None}
CUDA_GRAPHS = {"training.compile": True, "training.compile_mode": "reduce-overhead"}
INVERSE = {"training.lambda_inv_enc": 0.1, "training.lambda_inv_dec": 0.1}


@pytest.fixture
def train_cuda(tiny_config, train_here):
    """`train_cuda(folder, **overlay)`: a short run on the GPU, as a worker would make it; its events."""

    def train(folder, at_step=lambda step: None, **overlay):
        config = tiny_config(**CUDA, **overlay)
        ranks = parallel.initialise(config)
        try:
            return train_here(config, folder, at_step, ranks)
        finally:
            parallel.shutdown(ranks)

    return train


@pytest.fixture
def cuda_setup(tiny_config):
    """`cuda_setup(**overlay)`: all that a step on the GPU needs, without a run."""
    torch._dynamo.reset()
    made = []

    def make(**overlay):
        ranks = Ranks(device=torch.device("cuda", 0))
        made.append(Setup.build(tiny_config(**CUDA, **overlay), Path(), ranks, lambda message: None))
        return made[-1]

    yield make
    for setup in made:
        setup.tf32.set(False)
    torch._dynamo.reset()


def take_steps(setup, count, first=0):
    epoch = setup.loader.epoch(0)
    return [setup.step([next(epoch)], first + step)[0].item() for step in range(count)]


def losses(events):
    return np.array([event["loss"] for event in events if event["kind"] == "step"])


@pytest.mark.parametrize(
    "settings",
    (
        {},
        {"training.amp": True, "training.amp_dtype": "bfloat16"},
        {"training.amp": True, "training.amp_dtype": "float16"},
        {"training.compile": True},
        {"training.compile": True, "training.amp": True, "training.amp_dtype": "bfloat16"},
        {"optimizer.fused": True},
        {"operator.pdet.attention": "math"},
        {"operator.pdet.attention": "efficient"},
        {"operator.pdet.attention": "flash", **BF16},
        {"operator.pdet.attention": "flex"},
        {"operator.pdet.attention": "flex", **BF16, "training.compile": True},
        {"optimizer.foreach": False},
        {"training.tf32": True},
        {**OFFLOAD, "training.accum_steps": 2},
        {**OFFLOAD, **BF16, "training.compile": True, "optimizer.fused": True},
        {**CUDA_GRAPHS, "training.accum_steps": 2, "training.ema_decay": 0.9},
        {**CUDA_GRAPHS, **BF16, "operator.pdet.use_activation_checkpoint": True},
    ),
    ids=lambda settings: ", ".join(map(str, settings.values())) or "eager",
)
def test_a_short_run_learns_and_ends(train_cuda, tmp_path, settings):
    events = train_cuda(tmp_path / "run", **settings)
    loss = losses(events)
    assert np.isfinite(loss).all() and loss[-5:].mean() < 0.9 * loss[:5].mean()
    assert events[-1]["kind"] == "end" and events[-1]["reason"] == "epochs"
    steps = [event for event in events if event["kind"] == "step"]
    assert [event["step"] for event in steps] == list(range(1, len(steps) + 1))
    assert all(event["step_time_ms"] > 0 for event in steps)
    evaluation = json.loads((tmp_path / "run" / runfolder.EVALUATION).read_text())
    assert evaluation["datasets"].keys() == {"advection", "darcy"}
    names = checkpoint.load(tmp_path / "run")["setup"]["model"]
    assert not any(part in name for name in names for part in ("module.", "_orig_mod."))


@pytest.mark.parametrize(
    "settings",
    ({}, {**INVERSE, "training.inverse_loss_frequency": 2}, {"training.query_sampling.num_queries": 20}),
    ids=("plain", "inverse losses", "points"),
)
def test_compiled_steps_are_the_eager_ones_up_to_rounding(train_cuda, tmp_path, settings):
    adamw = {"optimizer.name": "adamw", **settings}
    eager = train_cuda(tmp_path / "eager", **adamw)
    compiled = train_cuda(tmp_path / "compiled", **adamw, **{"training.compile": True})
    np.testing.assert_allclose(losses(compiled), losses(eager), rtol=5e-3)


def test_on_one_gpu_model_and_losses_are_one_graph_and_the_inverse_ones_one_more(cuda_setup):
    setup = cuda_setup(**INVERSE, **{"training.compile": True, "training.inverse_loss_frequency": 2})
    counter = CompileCounter()
    assert vars(setup.objective).keys() >= {*setup.objective.GRAPHS}
    assert not any(part._compiled_call_impl for part in setup.model.compiled())
    take_steps(setup, 4)  # two of each dataset, the first with inverse losses
    found = counter.read()
    assert (found.graphs, found.graph_breaks) == (4, 0)
    for on in (False, True):
        setup.update(overlays.apply(setup.config, {"training.compile": on}))
        take_steps(setup, 4, first=4)
    assert not counter.read()


def test_a_compiled_microbatch_launches_less_than_half_of_the_kernels(cuda_setup):
    setup, counts = cuda_setup(**INVERSE), []
    for on in (False, True):
        setup.update(overlays.apply(setup.config, {"training.compile": on}))
        (batch, *_), weights = setup.loader.peek(), setup.objective.weights(0, 0)
        setup.loss(batch, weights, torch.bfloat16)[0].backward()  # traces, and settles the allocator
        torch.cuda.synchronize()
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as taken:
            setup.loss(batch, weights, torch.bfloat16)[0].backward()
            torch.cuda.synchronize()
        counts.append(sum(event.device_type == torch.autograd.DeviceType.CUDA for event in taken.events()))
    assert 0 < counts[1] < counts[0] / 2


def test_a_settled_step_in_cuda_graphs_skips_none_and_records_none_again(cuda_setup):
    setup, counter = cuda_setup(**CUDA_GRAPHS), CompileCounter()
    take_steps(setup, 12)
    assert counter.read().cuda_graphs_skipped == 0
    take_steps(setup, 12, first=12)
    assert not counter.read()


@pytest.mark.parametrize(
    "settings",
    (
        CUDA_GRAPHS,
        OFFLOAD,
        {"operator.pdet.attention": "flex"},
        {"operator.pdet.attention": "efficient"},
        {"optimizer.fused": True},
        {"optimizer.foreach": False},
    ),
    ids=lambda settings: ", ".join(map(str, settings.values())),
)
def test_what_makes_a_step_faster_changes_it_by_rounding_only(train_cuda, tmp_path, settings):
    common = {"optimizer.name": "adamw", "training.grad_clip": None, "training.accum_steps": 2}
    plain = train_cuda(tmp_path / "plain", **common)
    fast = train_cuda(tmp_path / "fast", **{**common, **settings})
    np.testing.assert_allclose(losses(fast), losses(plain), rtol=5e-3)


@pytest.mark.parametrize("scaled", [{}, {"training.amp": True, "training.amp_dtype": "float16"}], ids=["", "float16"])
def test_gradients_that_are_copied_during_the_backward_pass_are_those_that_it_leaves(train_cuda, tmp_path, scaled):
    single = {"optimizer.name": "adamw", "training.grad_clip": 0.1, "training.accum_steps": 1, **scaled}
    plain = train_cuda(tmp_path / "plain", **single)
    copied = train_cuda(tmp_path / "copied", **single, **{"training.cpu_offload_optimizer": True})
    np.testing.assert_allclose(losses(copied), losses(plain), rtol=5e-3)


def test_offloaded_moments_lie_in_host_memory_and_come_back(tiny_config):
    ranks = Ranks(device=torch.device("cuda", 0))
    setup = Setup.build(tiny_config(**CUDA, **{"training.grad_clip": None}), Path(), ranks, lambda message: None)

    def step(number):
        epoch = setup.loader.epoch(0)
        setup.step([next(epoch)], number)
        return setup.optimizers[-1].state

    assert all(state["exp_avg"].is_cuda for state in step(0).values())
    setup.update(overlays.apply(setup.config, OFFLOAD))
    state = step(1)
    large = [p for p in state if p.numel() >= 4096]
    assert large and not any(state[p]["exp_avg"].is_cuda for p in large)
    assert all(int(state[p]["step"]) == 2 for p in large)
    setup.update(overlays.apply(setup.config, {"training.cpu_offload_optimizer": False}))
    assert all(state["exp_avg"].is_cuda and int(state["step"]) == 3 for state in step(2).values())
    assert not any(p._post_accumulate_grad_hooks for p in setup.model.parameters())


def test_evaluation_computes_in_float32_where_training_does_in_tensorfloat32(cuda_setup):
    setup = cuda_setup(**{"training.tf32": True})
    assert torch.backends.cuda.matmul.allow_tf32
    with evaluation.evaluation_model(setup):
        assert not torch.backends.cuda.matmul.allow_tf32 and not torch.backends.cudnn.allow_tf32
    assert torch.backends.cuda.matmul.allow_tf32


def test_tensorfloat32_is_on_during_the_run_and_put_back_after_it(train_cuda, tmp_path):
    before, during = torch.get_float32_matmul_precision(), []
    train_cuda(
        tmp_path / "run", lambda step: during.append(torch.backends.cuda.matmul.allow_tf32), **{"training.tf32": True}
    )
    assert during[0] and not during[-1], "evaluations, which beat as well, are in float32"
    assert torch.get_float32_matmul_precision() == before


@pytest.mark.parametrize("stage", ["crps", "refine", "diff_residual"])
def test_a_stage_that_draws_is_trained_and_judged_on_the_gpu(train_cuda, tmp_path, stage):
    events = train_cuda(tmp_path / "run", **{f"stages.{stage}.epochs": 1, "data.split.validation_fraction": 0.3})
    (gate,) = [event for event in events if event["kind"] == "gate" and event["stage"] == stage]
    assert gate["verdict"] and [event for event in events if event["kind"] == "end"]


def test_a_step_in_which_no_term_acts_changes_nothing(train_cuda, tmp_path):
    only = {"training.loss_frequency": {"relative": 2}, "training.accum_steps": 1, "training.amp": True}
    events = train_cuda(tmp_path / "run", **only, **{"training.amp_dtype": "float16"})
    assert [event for event in events if event["kind"] == "end"]


def test_the_optimizer_s_time_is_part_of_the_step_s(train_cuda, tmp_path):
    steps = [event for event in train_cuda(tmp_path / "run") if event["kind"] == "step"]
    assert all(0 < step["optimizer_ms"] < step["step_time_ms"] for step in steps)


def test_the_gpu_trains_like_the_cpu(train_cuda, train_here, tiny_config, tmp_path):
    adamw = {"optimizer.name": "adamw"}
    gpu = train_cuda(tmp_path / "gpu", **adamw)
    cpu = train_here(tiny_config(**adamw), tmp_path / "cpu")
    np.testing.assert_allclose(losses(gpu), losses(cpu), rtol=1e-2)


def test_peak_memory_is_the_allocator_s(train_cuda, tmp_path):
    torch.cuda.reset_peak_memory_stats()
    events = train_cuda(tmp_path / "run")
    end = events[-1]
    assert end["memory_kind"] == "CUDA allocator, peak"
    assert end["peak_memory_gib"][0] == pytest.approx(torch.cuda.max_memory_allocated() / 2**30, abs=1e-3)
    assert 0 < end["peak_memory_gib"][0] < 1


@pytest.mark.parametrize("pinned", (False, True))
def test_pinned_batches_arrive_as_they_were_read(tiny_setup, tiny_config, pinned, monkeypatch):
    copies, real = [], torch.Tensor.to

    def to(self, *arguments, **options):
        if options.get("non_blocking") is not None and self.device.type == "cpu":
            copies.append((self.is_pinned(), options["non_blocking"]))
        return real(self, *arguments, **options)

    settings = {"data.residency": "workers", "training.num_workers": 2, "training.pin_memory": pinned}
    config = tiny_config(**settings)
    datasets = tiny_setup().datasets
    host = list(Loader(datasets, config, 0, 1, "cpu").epoch(0))[:4]
    monkeypatch.setattr(torch.Tensor, "to", to)
    for wanted, found in zip(host, Loader(datasets, config, 0, 1, "cuda").epoch(0)):
        assert found.inputs.device.type == found.targets.device.type == found.parameters.device.type == "cuda"
        assert torch.equal(found.inputs.cpu(), wanted.inputs) and torch.equal(found.targets.cpu(), wanted.targets)
    monkeypatch.undo()
    assert copies and all(copy == (pinned, pinned) for copy in copies)


def test_resident_data_lives_on_the_device(tiny_config, tiny_setup):
    loader = Loader(tiny_setup().datasets, tiny_config(**CUDA), 0, 1, "cuda")
    assert all(field.device.type == "cuda" for fields in loader.reader.fields.values() for field in fields)


def test_a_continued_run_is_the_run_that_was_never_stopped(train_cuda, tmp_path):
    settings = {"operator.pdet.drop_path": 0.3, "training.noise": 0.1, "optimizer.name": "adamw"}
    whole = losses(train_cuda(tmp_path / "whole", **settings))
    folder = tmp_path / "parts"
    train_cuda(
        folder, lambda step: runfolder.write_control(folder, None, runfolder.STOP) if step == 13 else None, **settings
    )
    (folder / runfolder.CONTROL).unlink()
    parts = losses(train_cuda(folder, **settings, **{"checkpoint.resume": True}))
    np.testing.assert_allclose(parts, whole, rtol=1e-3)  # sums on a GPU come in any order; other noise would be 0.1


def test_one_nccl_rank_averages_over_itself(tiny_setup, monkeypatch):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": "0", "WORLD_SIZE": "1"}
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    torch.distributed.init_process_group("nccl", device_id=device)
    try:
        setup = tiny_setup(**CUDA)
        wrapped = torch.nn.parallel.DistributedDataParallel(setup.loss.to(device), device_ids=[0])
        batch = next(iter(setup.loader.epoch(0)))
        for key in ("inputs", "targets", "parameters"):
            setattr(batch, key, getattr(batch, key).to(device))
        setup.loss.generator = torch.Generator(device)
        setup.loss.touch_all = True
        total, _ = wrapped(batch, {"relative": 1.0}, torch.bfloat16)
        total.backward()
        assert total.isfinite() and setup.model.operator.output.weight.grad.isfinite().all()
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize("name", ("adamw", "muon_hybrid"))
@pytest.mark.parametrize("dtype", ("float32", "bfloat16", "float16"))
def test_one_sharded_nccl_rank_trains_as_a_plain_one(tiny_config, train_here, tmp_path, dtype, name):
    found = {}
    for sharded in (False, True):
        amp = {"training.amp": dtype != "float32", "training.amp_dtype": dtype}
        settings = {"training.use_fsdp2": sharded, "training.ema_decay": 0.9, "training.accum_steps": 3}
        config = tiny_config(**CUDA, **amp, **settings, **{"optimizer.name": name})
        ranks = parallel.initialise(config)
        try:
            events = train_here(config, tmp_path / str(sharded), ranks=ranks)
        finally:
            parallel.shutdown(ranks)
        assert events[-1]["reason"] == "epochs"
        found[sharded] = losses(events)
    exact = dtype == "float32" and name == "adamw"  # Muon multiplies in bfloat16
    np.testing.assert_allclose(found[True], found[False], rtol=1e-3 if exact else 3e-2)


def test_a_step_that_failed_on_a_sharded_rank_can_be_taken_again(tiny_config):
    def fail(*arguments):
        raise RuntimeError("on purpose")

    config = tiny_config(**CUDA, **{"training.use_fsdp2": True})
    ranks = parallel.initialise(config)
    try:
        setup = Setup.build(config, Path(), ranks, lambda message: None)
        hook = setup.model.operator.blocks[-1].register_forward_pre_hook(fail)
        with pytest.raises(RuntimeError, match="on purpose"):
            take_steps(setup, 1)
        hook.remove()
        setup.discard_step()
        assert np.isfinite(take_steps(setup, 4)).all()
    finally:
        parallel.shutdown(ranks)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_two_nccl_ranks_train_alike_replicated_sharded_and_with_gradients_in_bfloat16(tiny_config, tmp_path):
    found, root = {}, str(Path(__file__).resolve().parents[2])
    for name in ("replicated", "use_fsdp2", "bf16_gradients"):
        settings = {"training.num_gpus": 2, "training.accum_steps": 3, "optimizer.name": "adamw"}
        settings |= {} if name == "replicated" else {f"training.{name}": True}
        folder = tmp_path / name
        runfolder.create(tiny_config(**CUDA, **settings), folder)
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
        done = subprocess.run(
            [*torchrun, "-m", "upsnb.worker", str(folder)],
            env={**os.environ, "PYTHONPATH": root},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr[-3000:]
        found[name] = losses(runfolder.read_events(folder))
    np.testing.assert_allclose(found["use_fsdp2"], found["replicated"], rtol=1e-3)
    np.testing.assert_allclose(found["bf16_gradients"], found["replicated"], rtol=3e-2)


def test_the_allocator_of_a_process_that_is_told_to_grows_its_segments(tiny_config):
    code = "import torch; x = torch.ones(2**22, device='cuda'); print(torch.cuda.memory_snapshot()[0]['is_expandable'])"
    for on in (True, False):
        told = allocator_environment(tiny_config(**CUDA, **{"training.expandable_segments": on}))
        command = [sys.executable, "-c", code]
        done = subprocess.run(command, env=os.environ | told, capture_output=True, text=True, check=True)
        assert done.stdout.strip() == str(on)


def test_the_driver_tells_power_and_clock_of_a_busy_gpu():
    pytest.importorskip("pynvml")
    matrix = torch.randn(4096, 4096, device="cuda")
    for _ in range(20):
        matrix = torch.nn.functional.normalize(matrix @ matrix)
    readings, missing = telemetry.sample(range(1))
    assert missing == [] or all("utilisation" in sentence for sentence in missing)  # a slice of a GPU tells none
    assert 5 < readings["power_w"][0] < 2000 and 100 < readings["clock_mhz"][0] < 5000


@pytest.mark.parametrize(
    "settings",
    ({}, {"operator.pdet.use_activation_checkpoint": True}, {"training.amp": True, "training.amp_dtype": "bfloat16"}),
    ids=("eager", "checkpointing", "bfloat16"),
)
def test_memory_prediction_is_what_cudas_allocator_saw(tiny_config, settings):
    """Heads as large as the tiles of 64 x 64 in which attention's backward kernel adds up, unseen by a prediction."""
    settings = {**settings, "operator.pdet.hidden_dim": 128, "latent.tokens": 64}
    config = tiny_config(**CUDA, **{"training.batch_size": 512, **settings})
    predicted, measured = predict.predict(config), measure.measure(config)
    assert predicted.nbytes == pytest.approx(measured.nbytes, rel=0.1)
    assert max(measured.history["allocated_bytes"]) >= 0.9 * measured.nbytes
    assert measured.history["out_of_memory"] is None and measured.history["largest"]


def test_what_libraries_keep_for_themselves_is_not_measured(tiny_config):
    config = tiny_config(**CUDA)
    measured, predicted = measure.measure(config), predict.predict(config)
    assert abs(measured.nbytes - predicted.nbytes) < 4 * 2**20  # cuBLAS takes 8 to 32 MiB a handle


@pytest.mark.parametrize("settings", (OFFLOAD, {"operator.pdet.attention": "flex"}), ids=("offload", "flex"))
def test_predicting_takes_no_memory_of_the_gpu_and_none_of_its_random_numbers(tiny_config, settings):
    config, before = tiny_config(**CUDA, **settings), torch.cuda.get_rng_state()
    torch.cuda.reset_peak_memory_stats()
    taken = torch.cuda.memory_allocated()
    assert predict.predict(config).nbytes > 0
    assert torch.cuda.max_memory_allocated() - taken < 2**16  # torch keeps a few constants of fake tensors for real
    measure.measure(config)
    chosen.build(config, {})
    assert torch.equal(torch.cuda.get_rng_state(), before)


def test_running_out_of_memory_leaves_a_history_that_names_the_line():
    device = torch.device("cuda", 0)
    meter = measure.Meter(device)
    with pytest.raises(torch.OutOfMemoryError), meter:
        meter.begin()
        kept = torch.empty(2**20, device=device)
        torch.empty(2**50, dtype=torch.uint8, device=device)
    assert meter.history["out_of_memory"]["requested_bytes"] >= 2**50
    assert meter.history["largest"][0]["nbytes"] >= kept.nbytes


@pytest.mark.parametrize("settings", [{}, BF16, {"training.compile": True}], ids=["float32", "bf16", "compiled"])
def test_a_profile_of_a_gpu_run_is_made_of_kernels(train_cuda, tmp_path, settings):
    inverse = {"training.lambda_inv_enc": 0.1, "training.lambda_inv_dec": 0.1, "stages.operator.epochs": 20}

    def ask(step):
        run = handle.Run(tmp_path)
        if step == 20:
            run.profile()
        if run.events(("profile",)):
            run.stop()

    train_cuda(tmp_path, ask, **inverse, **settings)
    (record,) = report.read(tmp_path, 1)
    parts = report.partition(record)
    assert sum(parts.values()) == pytest.approx(record["step_ms"])
    assert all(value >= 0 for value in parts.values()) and parts["inverse losses"] > 0
    assert record["trace"]["inverse_backward_ms"] > 0 and record["trace"]["num_launches"] > 10
    assert sum(traced["busy_ms"] for traced in record["trace"]["parts"].values()) > 0
    assert record["flops_per_step"] > 0 and record["matrix_peak"]["tflops"] > 0
    assert record["product_bytes_per_step"] > 0 and record["bandwidth_gb_per_s"] > 10
