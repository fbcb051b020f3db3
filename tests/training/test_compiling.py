"""Compiled steps: how many graphs there are, what is left outside, when one is made anew, and what is kept on disk."""

import contextlib
import os
import subprocess
import sys
from collections import Counter
from types import SimpleNamespace

import pytest
import torch
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd
from torch.profiler import ProfilerActivity, profile, record_function

from upsnb import overlays
from upsnb.config import TrainingConfig
from upsnb.models.transformer import Block
from upsnb.runs import ranks, runfolder
from upsnb.training import compiling
from upsnb.training.compiling import CompileCounter, keep_graphs
from upsnb.training.timing import StepClock

DATASETS = 2
AS_A_WHOLE = compiling.as_a_whole
GRAPH = "compiled graph"
INVERSE = {"training.lambda_inv_enc": 0.1, "training.lambda_inv_dec": 0.1}


@pytest.fixture(autouse=True)
def traced_only(monkeypatch):
    """The compiler's tracing half, which makes graphs and guards, without generating kernels: seconds, not minutes."""
    torch._dynamo.reset()
    monkeypatch.setattr(compiling, "BACKEND", "eager")
    monkeypatch.setattr(compiling, "as_a_whole", lambda *_: True)  # on a CPU, too
    yield
    torch._dynamo.reset()


@pytest.fixture
def setup(tiny_setup):
    return tiny_setup(**{"training.compile": True, "operator.pdet.depth": 1})


def change(setup, **overlay) -> None:
    setup.update(overlays.apply(setup.config, overlay))


def turn(setup, steps: int = DATASETS, first: int = 0) -> None:
    """Steps of alternating datasets."""
    epoch = setup.loader.epoch(0, first)
    for step in range(first, first + steps):
        setup.step([next(epoch)], step)


def test_a_step_of_each_dataset_is_one_graph_without_breaks(setup):
    counter = CompileCounter()
    turn(setup)
    found = counter.read()
    assert (found.graphs, found.graph_breaks) == (DATASETS, 0)
    # The same code for another dataset; for the first too where an earlier test compiled it, which torch remembers.
    assert DATASETS - 1 <= found.recompiles <= DATASETS
    assert found.duration_s > 0


def test_inverse_losses_now_and_then_are_one_more_graph_and_leave_the_others_as_they_are(tiny_setup):
    rare = {"training.inverse_loss_frequency": 2, "training.loss_warmup_steps": {"relative": 100}, **INVERSE}
    setup, counter = tiny_setup(**{"training.compile": True, **rare}), CompileCounter()
    turn(setup, steps=4)  # two of each dataset, the first with inverse losses
    assert counter.read().graphs == 2 * DATASETS
    turn(setup, steps=4, first=4)  # other weights
    assert not counter.read()


def launched(events) -> Counter:
    """Operations that compute, by name, of a profile: those outside of compiled graphs, and the graphs as one each."""
    found, waiting = Counter(), [event for event in events if event.cpu_parent is None]
    while waiting:
        event = waiting.pop()
        inner = [child for child in event.cpu_children if event.name != GRAPH]
        if event.name == GRAPH or (event.name.startswith("aten::") and not inner and not is_view(event.name)):
            found[event.name] += 1
        waiting += inner
    return found


def is_view(name: str) -> bool:
    """Whether an operation returns its argument's own memory, or memory alone."""
    operator = getattr(torch.ops.aten, name.removeprefix("aten::"))
    returns = getattr(operator, operator.overloads()[0])._schema.returns
    return "empty" in name or any(value.alias_info and not value.alias_info.is_write for value in returns)


def test_at_reference_width_a_microbatch_launches_a_third_of_what_it_did(tiny_setup, monkeypatch):
    """Outside of graphs were 281 launches: physical units, query points and the decoder at them, losses, condition.

    Inside of them are the same operations as before, fused further; the first block stands for all.
    """

    def compiled(graph, inputs):
        def run(*inputs):
            with record_function(GRAPH):
                return graph(*inputs)

        return make_boxed_func(run)

    monkeypatch.setattr(compiling, "BACKEND", aot_autograd(fw_compiler=compiled, bw_compiler=compiled))
    width = {"latent.dim": 384, "operator.pdet": {"hidden_dim": 384, "num_heads": 8, "depth": 1}}
    draws = {"training.query_sampling.num_queries": 20, "training.noise": 0.01}
    amp = {"training.amp": True, "training.amp_dtype": "bfloat16", "training.compile": True, "training.batch_size": 2}
    setup = tiny_setup(("advection",), **width, **draws, **amp, **INVERSE)
    (batch,), weights = setup.loader.peek(), setup.objective.weights(0, 0)
    for context in (contextlib.nullcontext(), profile(activities=[ProfilerActivity.CPU])):  # the first one traces
        setup.model.zero_grad()
        with context as taken:
            setup.loss(batch, weights, torch.bfloat16)[0].backward()
    found = launched(taken.events())
    assert found[GRAPH] == 4 and found.total() <= 281 / 3, found  # fields and inverse terms, forward and backward


TWICE = {**INVERSE, "training.lambda_forward": 0.1, "training.lambda_rollout": 0.1, "operator.rollout": "latent"}
FOURIER = {"model": {"build": "upsnb.models.fno:FNO", "settings": {"width": 8, "modes": 4, "depth": 1}}}


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("advection", {**INVERSE, "training.noise": 0.01}),
        ("advection", {"operator.pdet.use_activation_checkpoint": True}),
        ("advection", TWICE),
        ("darcy", {"training.lambda_spectral": 0.1, "training.query_sampling.num_queries": 20}),
        ("darcy", {**FOURIER, "optimizer.name": "adamw"}),
    ],
    ids=["inverse losses", "recomputed", "two calls", "points", "FNO"],
)
def test_graphs_of_whole_steps_compute_what_eager_code_does(tiny_setup, monkeypatch, name, settings):
    monkeypatch.setattr(compiling, "BACKEND", "aot_eager")
    setup, found = tiny_setup((name,), **{"operator.pdet.depth": 1, **settings}), []
    weights = setup.objective.weights(0, 0)
    for on in (False, True):
        change(setup, **{"training.compile": on})
        setup.generator.manual_seed(0)
        setup.model.zero_grad()
        total, values = setup.loss(setup.loader.peek()[0], weights, None)
        total.backward()
        gradients = {name: p.grad for name, p in setup.model.named_parameters() if p.grad is not None}
        found.append((total.detach(), values, gradients))
    torch.testing.assert_close(*found, rtol=1e-3, atol=1e-5)


def test_on_a_cpu_and_under_fsdp2_parts_are_compiled_instead_each_kind_once_a_dataset(setup, monkeypatch):
    for chosen in (AS_A_WHOLE, lambda *_: True, AS_A_WHOLE):
        monkeypatch.setattr(compiling, "as_a_whole", chosen)
        compiling.set_compile(setup.objective, setup.config.training)
        whole = chosen is not AS_A_WHOLE
        assert all(bool(part._compiled_call_impl) != whole for part in setup.model.compiled())
        assert [name in vars(setup.objective) for name in setup.objective.GRAPHS] == [whole] * 2
    counter = CompileCounter()
    turn(setup)
    assert counter.read().graphs == len(("block", "encoder", "decoder")) * DATASETS - 1  # of blocks of as many tokens
    for settings, whole in (({}, True), ({"use_fsdp2": True}, False), ({"num_gpus": 2}, False)):
        assert AS_A_WHOLE(setup.objective, TrainingConfig(compile=True, **settings), "cuda") == whole
    monkeypatch.setattr(setup.model, "compiled", list)
    assert AS_A_WHOLE(setup.objective, TrainingConfig(compile=True), "cpu"), "what has no parts"


def test_twenty_steps_of_alternating_datasets_compile_nothing_again(setup):
    turn(setup)
    counter = CompileCounter()
    turn(setup, steps=4)
    turn(setup, steps=4)
    for first in range(0, 20, 2):
        turn(setup, first=first)
    assert not counter.read()


def test_another_batch_size_makes_each_graph_once_more_and_the_old_one_none(setup):
    turn(setup)
    counter = CompileCounter()
    change(setup, **{"training.batch_size": 4})
    turn(setup)
    found = counter.read()
    assert found.graphs == found.recompiles == DATASETS
    change(setup, **{"training.batch_size": 8})
    turn(setup)
    assert not counter.read()


def test_switched_off_nothing_compiled_runs_and_switched_on_nothing_is_compiled_again(setup):
    turn(setup)
    counter, frames = CompileCounter(), dict(torch._dynamo.utils.counters["frames"])
    change(setup, **{"training.compile": False})
    with torch.compiler.set_stance("fail_on_recompile"):
        turn(setup)
    change(setup, **{"training.compile": True})
    turn(setup)
    assert not counter.read() and torch._dynamo.utils.counters["frames"] == frames


@pytest.mark.slow
@pytest.mark.parametrize(
    "overlay",
    [
        {"operator.pdet.use_activation_checkpoint": True},
        *(
            pytest.param(overlay, marks=pytest.mark.long)
            for overlay in (
                {"training.amp": True, "training.amp_dtype": "bfloat16"},
                {"operator.pdet.attention": "math"},
                {"operator.pdet.attention": "flash"},
                {"operator.pdet.drop_path": 0.2},
            )
        ),
        {"operator.encoder": "perceiver", "operator.decoder": "cross_attention"},
    ],
    ids=str,
)
def test_no_setting_breaks_a_graph_of_a_part(tiny_setup, overlay, monkeypatch):
    monkeypatch.setattr(compiling, "as_a_whole", AS_A_WHOLE)
    tokens = {"data.datasets.advection.tokens": 8}  # else both datasets have 16 tokens and share the blocks' graph
    setup = tiny_setup(**{"training.compile": True, **tokens, **overlay})
    counter = CompileCounter()
    turn(setup)
    found = counter.read()
    kinds = 3 + ("operator.pdet.drop_path" in overlay)  # block, encoder, decoder; its first block drops nothing
    assert (found.graphs, found.graph_breaks) == (kinds * DATASETS, 0)


def test_a_graph_break_is_counted(setup):
    setup.model.operator.blocks[0].mlp.up.register_forward_pre_hook(lambda *_: torch._dynamo.graph_break())
    counter = CompileCounter()
    turn(setup)
    assert counter.read().graph_breaks > 0


def test_cuda_graphs_that_are_skipped_or_recorded_again_are_counted_and_their_steps_not_steady(monkeypatch):
    manager = SimpleNamespace(num_rerecord={"root": {}})
    trees = SimpleNamespace(get_manager=lambda device, create_if_none_exists: manager)
    with monkeypatch.context() as patched:  # undone before torch is reset
        patched.setitem(sys.modules, "torch._inductor.cudagraph_trees", trees)
        patched.setattr(torch.cuda, "is_available", lambda: True)
        patched.setattr(torch.cuda, "current_device", lambda: 0)
        counter, clock = CompileCounter(), StepClock(torch.device("cpu"))
        for step in range(20):
            steady = clock.is_steady(step, counter.read())
            clock.interrupted = False
        assert steady
        manager.num_rerecord["root"]["forward"] = 2
        torch._dynamo.utils.counters["inductor"]["cudagraph_skips"] += 3
        found = counter.read()
        assert (found.cuda_graphs_again, found.cuda_graphs_skipped, found.graphs) == (2, 3, 0) and found
        assert not clock.is_steady(20, found) and not counter.read()


class Twice(torch.nn.Module):
    """A block that is called as a model calls it."""

    def __init__(self, block):
        super().__init__()
        self.block = block

    def forward(self, x, modulation):
        return self.block(self.block(x, modulation, None), modulation, None)


def test_at_reference_width_ddp_leaves_a_block_one_graph():
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    graphs, found = [], {}
    try:
        block = Block(384, 6, 4.0, True, 0.0, "sdpa")
        block.compile(backend=lambda graph, inputs: graphs.append(graph) or graph.forward, dynamic=False)
        model = torch.nn.parallel.DistributedDataParallel(Twice(block), bucket_cap_mb=4)
        for keep in (contextlib.nullcontext, keep_graphs):
            torch._dynamo.reset()
            graphs.clear()
            with keep():
                model(torch.randn(2, 16, 384, requires_grad=True), torch.randn(2, 4, 384)).sum().backward()
            found[keep] = len(graphs)
    finally:
        torch.distributed.destroy_process_group()
    assert found[contextlib.nullcontext] > 1 and found[keep_graphs] == 1  # as torch comes it cuts at its buckets


@pytest.mark.slow
def test_more_flips_than_torch_keeps_graphs_for_are_all_compiled(setup):
    sizes = range(2, 7)
    assert DATASETS * len(sizes) > torch._dynamo.config.recompile_limit
    counter = CompileCounter()
    for size in sizes:
        change(setup, **{"training.batch_size": size})
        turn(setup)
    assert counter.read().graphs == DATASETS * len(sizes)


def test_too_many_graphs_are_an_error_and_no_silent_return_to_eager(setup, monkeypatch):
    monkeypatch.setattr(compiling, "MOST_GRAPHS", 1)
    with pytest.raises(Exception, match="recompile_limit"):
        turn(setup)


def test_a_step_leaves_the_compiler_s_settings_as_it_found_them(setup):
    before = torch._dynamo.config.save_config_portable()
    turn(setup)
    assert torch._dynamo.config.save_config_portable() == before


def test_compilations_of_a_run_are_events(tiny_config, train_here, tmp_path):
    torch.compiler.reset()  # graphs of other tests' models, of which it would be one more
    config = tiny_config(**{"training.compile": True, "evaluation.rollout": False})
    events = train_here(config, tmp_path / "run")
    compiled = [event for event in events if event["kind"] == "compile"]
    assert [event["step"] for event in compiled] == [1]  # before it
    (all_graphs,) = compiled
    assert all_graphs["graphs"] == DATASETS and all_graphs["recompiles"] == DATASETS - 1
    assert all_graphs.keys() >= {"cache_hits"} and all_graphs["graph_breaks"] == 0
    steps = {event["step"]: event for event in events if event["kind"] == "step"}
    assert (
        0 < all_graphs["duration_s"] < next(e for e in events if e["kind"] == "first_step")["since_launch_s"]
        and not steps[1]["steady"]
    )
    assert all(0 < step["optimizer_ms"] < step["step_time_ms"] for step in steps.values())


def test_workers_keep_kernels_beside_the_runs_unless_told_where(tiny_config, tmp_path, monkeypatch):
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    config, folder = tiny_config(), tmp_path / "outputs" / "run"
    environment = ranks.environment(folder, config, folder, 0, "1:2")
    assert environment["TORCHINDUCTOR_CACHE_DIR"] == str(folder.parent / runfolder.COMPILE_CACHE)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/elsewhere")
    assert ranks.environment(folder, config, folder, 0, "1:2")["TORCHINDUCTOR_CACHE_DIR"] == "/elsewhere"


ONE_PART = """
import types, torch
from upsnb.config import TrainingConfig
from upsnb.training import compiling
from upsnb.training.compiling import CompileCounter
from upsnb.models.transformer import Mlp
mlp = Mlp(8, 8)  # code of torch's own modules is never compiled in place
model = types.SimpleNamespace(compiled=lambda: [mlp])
objective = types.SimpleNamespace(GRAPHS=(), model=model, parameters=mlp.parameters)
compiling.set_compile(objective, TrainingConfig(compile=True))
counter = CompileCounter()
with torch.no_grad(), compiling.keep_graphs():
    mlp(torch.ones(4, 8))
found = counter.read()
print(found.graphs, found.cache_hits)
"""


@pytest.mark.slow
def test_a_second_process_finds_the_kernels_of_the_first(tmp_path):
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", ONE_PART]
    found = [subprocess.run(command, env=environment, capture_output=True, text=True, check=True) for _ in range(2)]
    (graphs, hits), (graphs_again, hits_again) = (map(int, done.stdout.split()) for done in found)
    assert (graphs, hits, graphs_again) == (1, 0, 1) and hits_again > 0
