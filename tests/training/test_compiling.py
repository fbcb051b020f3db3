"""Compiled parts: how many graphs there are, when one is made anew, and what is kept on disk."""

import contextlib
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from upsnb import overlays
from upsnb.models.transformer import Block
from upsnb.runs import runfolder
from upsnb.runs.supervisor import Supervisor
from upsnb.training import compiling
from upsnb.training.compiling import CompileCounter, keep_graphs
from upsnb.training.timing import StepClock

KINDS = 3  # block, encoder, decoder
DATASETS = 2
DIFFERENT = {"data.datasets.advection.tokens": 8}  # else both datasets have 16 tokens and share the blocks' graph


@pytest.fixture(autouse=True)
def traced_only(monkeypatch):
    """The compiler's tracing half, which makes graphs and guards, without generating kernels: seconds, not minutes."""
    torch._dynamo.reset()
    monkeypatch.setattr(compiling, "BACKEND", "eager")
    yield
    torch._dynamo.reset()


@pytest.fixture
def setup(tiny_setup):
    return tiny_setup(**{"training.compile": True, **DIFFERENT})


def change(setup, **overlay) -> None:
    setup.update(overlays.apply(setup.config, overlay))


def turn(setup, steps: int = DATASETS, first: int = 0) -> None:
    """Steps of alternating datasets."""
    epoch = setup.loader.epoch(0)
    for step in range(steps):
        setup.step([next(epoch)], first + step, first + step)


def test_each_dataset_and_kind_of_part_is_one_graph_without_breaks(setup):
    counter = CompileCounter()
    turn(setup)
    found = counter.read()
    assert (found.graphs, found.graph_breaks) == (KINDS * DATASETS, 0)
    # The same code for another dataset; for the first too where an earlier test compiled it, which torch remembers.
    assert KINDS * (DATASETS - 1) <= found.recompiles <= KINDS * DATASETS
    assert found.duration_s > 0


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
    assert found.graphs == found.recompiles == KINDS * DATASETS
    change(setup, **{"training.batch_size": 8})
    turn(setup)
    assert not counter.read()


def test_switched_off_nothing_compiled_runs_and_switched_on_nothing_is_compiled_again(setup):
    turn(setup)
    counter, frames = CompileCounter(), dict(torch._dynamo.utils.counters["frames"])
    change(setup, **{"training.compile": False})
    with torch.compiler.set_stance("fail_on_recompile"):
        turn(setup)
    assert not any(part._compiled_call_impl for part in setup.model.compiled())
    change(setup, **{"training.compile": True})
    assert all(part._compiled_call_impl for part in setup.model.compiled())
    turn(setup)
    assert not counter.read() and torch._dynamo.utils.counters["frames"] == frames


@pytest.mark.slow
@pytest.mark.parametrize(
    "overlay",
    [
        {"operator.pdet.use_activation_checkpoint": True},
        {"operator.pdet.attention": "math"},
        {"operator.pdet.attention": "flash"},
        {"training.amp": True, "training.amp_dtype": "bfloat16"},
        {"operator.pdet.drop_path": 0.2},
        {"operator.encoder": "perceiver", "operator.decoder": "cross_attention"},
    ],
    ids=str,
)
def test_no_setting_breaks_a_graph(tiny_setup, overlay):
    setup = tiny_setup(**{"training.compile": True, **DIFFERENT, **overlay})
    counter = CompileCounter()
    turn(setup)
    found = counter.read()
    kinds = KINDS + ("operator.pdet.drop_path" in overlay)  # its first block drops nothing
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
    assert counter.read().graphs == KINDS * DATASETS * len(sizes)


def test_too_many_graphs_are_an_error_and_no_silent_return_to_eager(setup, monkeypatch):
    monkeypatch.setattr(compiling, "MOST_GRAPHS", 1)
    with pytest.raises(Exception, match="recompile_limit"):
        turn(setup)


def test_a_step_leaves_the_compiler_s_settings_as_it_found_them(setup):
    before = torch._dynamo.config.save_config_portable()
    turn(setup)
    assert torch._dynamo.config.save_config_portable() == before


def test_compilations_of_a_run_are_events(tiny_config, train_here, tmp_path):
    config = tiny_config(**{"training.compile": True, "evaluation.rollout": False, **DIFFERENT})
    events = train_here(config, tmp_path / "run")
    compiled = [event for event in events if event["kind"] == "compile"]
    assert [event["step"] for event in compiled] == [1, 2]
    assert sum(event["graphs"] for event in compiled) == KINDS * DATASETS
    assert sum(event["recompiles"] for event in compiled) == KINDS
    steps = {event["step"]: event for event in events if event["kind"] == "step"}
    for event in compiled:
        assert event.keys() >= {"graph_breaks", "cache_hits"} and event["graph_breaks"] == 0
        assert 0 < event["duration_s"] < steps[event["step"]]["step_time_ms"] / 1e3
        assert not steps[event["step"]]["steady"]
    assert all(0 < step["optimizer_ms"] < step["step_time_ms"] for step in steps.values())


def test_workers_keep_kernels_beside_the_runs_unless_told_where(tiny_config, tmp_path, monkeypatch):
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    folder = runfolder.create(tiny_config(), tmp_path / "outputs" / "run")
    folder = tmp_path / "outputs" / "run" if folder is None else Path(folder)
    environment = Supervisor(folder)._environment()
    assert environment["TORCHINDUCTOR_CACHE_DIR"] == str(folder.parent / runfolder.COMPILE_CACHE)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/elsewhere")
    assert Supervisor(folder)._environment()["TORCHINDUCTOR_CACHE_DIR"] == "/elsewhere"


ONE_PART = """
import types, torch
from upsnb.training import compiling
from upsnb.training.compiling import CompileCounter
from upsnb.models.transformer import Mlp
mlp = Mlp(8, 8)  # code of torch's own modules is never compiled in place
compiling.set_compile(types.SimpleNamespace(compiled=lambda: [mlp]), "default")
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
