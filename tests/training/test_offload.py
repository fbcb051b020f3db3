"""AdamW in host memory: the same steps, moments carried both ways, copies that follow the weights.

Where there is no GPU, torchao's optimizer runs as it is, with stand-ins for streams, events and page-locked memory.
"""

import contextlib
import copy
import types

import pytest
import torch
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from upsnb import hardware, overlays
from upsnb.config import RunConfig
from upsnb.memory.predict import Rehearsal
from upsnb.training import optimizers
from upsnb.training.offload import OffloadedAdamW

OFF = {"training.grad_clip": None, "training.accum_steps": 2, "optimizer.fused": True, "training.ema_decay": 0.9}
ON = {"training.cpu_offload_optimizer": True}


class Stream:
    """A queue that has done everything at once; `waits` is told of each wait."""

    waits = staticmethod(lambda: None)

    def wait_stream(self, other):
        self.waits()

    def record_event(self):
        return types.SimpleNamespace(synchronize=lambda: None)

    def synchronize(self):
        pass


@pytest.fixture
def without_gpu(monkeypatch):
    from torchao.optim import cpu_offload

    empty_like = torch.empty_like
    monkeypatch.setattr(cpu_offload, "get_available_devices", lambda: ["cuda"])
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "current_stream", Stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    monkeypatch.setattr(torch, "empty_like", lambda x, pin_memory=False, **options: empty_like(x, **options))
    monkeypatch.setattr(hardware, "problems", lambda config, machine: [])


def change(setup, overlay: dict) -> None:
    setup.update(overlays.apply(setup.config, overlay))


def train(setup, steps: int, first: int = 0) -> None:
    for step in range(first, first + steps):
        epoch = setup.loader.epoch(0, 2 * step)
        optimizers.set_learning_rate(setup.optimizers, 1.0 / (step + 1))
        setup.step([next(epoch), next(epoch)], step)


def assert_same_weights(ours, theirs):
    for (name, one), other in zip(ours.model.named_parameters(), theirs.model.parameters(), strict=True):
        torch.testing.assert_close(one, other, atol=1e-6, rtol=1e-5, msg=name)


@pytest.mark.parametrize(
    "settings",
    [{}, {"training.grad_clip": 1e-2}, {"training.amp": True, "training.amp_dtype": "float16"}],
    ids=["", "clipped", "scaled"],
)
def test_steps_on_the_host_are_adamw_s(tiny_setup, without_gpu, settings):
    """With gradients as the step leaves them: accumulated, unscaled and clipped."""
    plain, offloaded = tiny_setup(**{**OFF, **settings}), tiny_setup(**{**OFF, **settings, **ON})
    adamw = offloaded.optimizers[-1]
    assert adamw.inner.optim_dict and adamw.inner.d_opt is not None  # large tensors there, small ones here
    assert isinstance(offloaded.optimizers[0], torch.optim.Muon)
    for setup in (plain, offloaded):
        train(setup, 3)
    assert_same_weights(offloaded, plain)


def train_singly(setup, steps: int) -> None:
    """Steps of one microbatch."""
    batches = setup.loader.epoch(0)
    for step in range(steps):
        setup.step([next(batches)], step)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"training.grad_clip": 1e-2},
        {"training.grad_clip": 1e-2, "training.amp": True, "training.amp_dtype": "float16"},
    ],
    ids=["", "clipped", "scaled and clipped"],
)
def test_gradients_that_are_copied_during_the_backward_pass_step_as_if_after_it(
    tiny_setup, without_gpu, monkeypatch, settings
):
    single = {**OFF, "training.accum_steps": 1, **settings}
    plain, offloaded = tiny_setup(**single), tiny_setup(**single, **ON)
    named = [*offloaded.model.named_parameters()]
    still_to_come, copy_one = [], OffloadedAdamW._copy

    def seen(self, parameter):
        still_to_come.append(sum(other.grad is None for _, other in named))
        copy_one(self, parameter)

    monkeypatch.setattr(OffloadedAdamW, "_copy", seen)
    for setup in (plain, offloaded):
        train_singly(setup, 4)
    assert_same_weights(offloaded, plain)
    assert max(still_to_come) > min(still_to_come), "the first were copied before the last had been computed"
    assert not any(p._post_accumulate_grad_hooks for _, p in named)


def test_no_gradient_is_changed_on_the_device_before_its_copy_was_read(tiny_setup, without_gpu, monkeypatch):
    setup, order = tiny_setup(**{**OFF, **ON, "training.accum_steps": 1, "training.grad_clip": 1e-2}), []
    clip = optimizers.clip
    monkeypatch.setattr(optimizers, "clip", lambda *given: order.append("clip") or clip(*given))
    monkeypatch.setattr(
        OffloadedAdamW, "wait", lambda self, real=OffloadedAdamW.wait: order.append("begin") or real(self)
    )
    monkeypatch.setattr(Stream, "waits", staticmethod(lambda: order.append("a stream waits")))
    train_singly(setup, 1)
    assert order[order.index("begin") :][:3] == ["begin", "a stream waits", "clip"]


def test_a_step_that_was_given_up_after_its_copies_is_taken_again_in_halves(tiny_setup, without_gpu, monkeypatch):
    """As after running out of memory: what was copied is of a step that never was."""
    single = {**OFF, "training.accum_steps": 1, "training.grad_clip": 1e-2}
    plain, offloaded = tiny_setup(**single), tiny_setup(**single, **ON)
    batches = [*offloaded.loader.epoch(0)]
    other = next(batch for batch in batches if batch.dataset == "advection")
    halves = [batch for batch in batches if batch.dataset == "darcy"][:2]
    with monkeypatch.context() as patch, pytest.raises(MemoryError):
        patch.setattr(optimizers, "clip", lambda *given: (_ for _ in ()).throw(MemoryError))
        offloaded.step([other], 0)
    offloaded.discard_step()
    adamw = offloaded.optimizers[-1]
    assert all(view.grad is None for view in adamw.views.values()) and not adamw.inner.queue, "nothing keeps its memory"
    for setup in (plain, offloaded):
        setup.step(halves, 0)
    assert_same_weights(offloaded, plain)


def test_flipped_on_and_off_training_goes_on_as_if_nothing_had_been(tiny_setup, without_gpu):
    plain, flipped = tiny_setup(**OFF), tiny_setup(**OFF)
    train(plain, 6)
    train(flipped, 2)
    change(flipped, ON)
    assert isinstance(flipped.optimizers[-1], OffloadedAdamW)
    train(flipped, 2, first=2)
    change(flipped, {"training.cpu_offload_optimizer": False})
    train(flipped, 2, first=4)
    assert_same_weights(flipped, plain)
    assert not any(p._post_accumulate_grad_hooks for p in flipped.model.parameters())


def test_loaded_weights_reach_the_host_and_a_swapped_average_does_not(tiny_setup, without_gpu):
    source, offloaded = tiny_setup(**OFF), tiny_setup(**OFF, **ON)
    train(source, 2)
    train(offloaded, 1)
    offloaded.load_state_dict(copy.deepcopy(source.state_dict()))
    offloaded.ema.swap()
    offloaded.ema.swap()
    for setup in (source, offloaded):
        train(setup, 2, first=2)
    assert_same_weights(offloaded, source)


def test_what_offloading_saves_any_setup_loads(tiny_setup, without_gpu):
    plain, offloaded = tiny_setup(**OFF), tiny_setup(**OFF, **ON)
    train(offloaded, 2)
    state = copy.deepcopy(offloaded.state_dict())
    assert state["moments"].keys() == {name for name, _ in offloaded.model.named_parameters()}
    plain.load_state_dict(state)
    for setup in (plain, offloaded):
        train(setup, 1, first=2)
    assert_same_weights(offloaded, plain)


def test_learning_rates_reach_every_inner_group_and_idle_parameters_rest(tiny_setup, without_gpu):
    setup = tiny_setup(**OFF, **ON)
    adamw = setup.optimizers[-1]
    assert optimizers.set_learning_rate(setup.optimizers, 0.25) == pytest.approx(0.25 * 1.4e-3)
    before = {name: p.detach().clone() for name, p in setup.model.named_parameters()}
    epoch = [batch for batch in setup.loader.epoch(0) if batch.dataset == "darcy"][:2]
    setup.step(epoch, 0)
    assert {group["lr"] for group, _ in adamw.inner_groups} == {0.25 * 1.4e-3}
    assert {group["weight_decay"] for group, _ in adamw.inner_groups} == {0.0, 0.03}
    stepped = {name for name, parameter in setup.model.named_parameters() if not torch.equal(parameter, before[name])}
    assert "encoders.darcy.embed.weight" in stepped and not any("advection" in name for name in stepped)


def test_sharded_parameters_are_stepped_where_they_lie(without_gpu, tmp_path):
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        plain = torch.nn.Linear(64, 80)
        sharded = copy.deepcopy(plain)
        mesh = torch.distributed.init_device_mesh("cpu", (1,))
        fully_shard(sharded, mesh=mesh)
        theirs = torch.optim.AdamW(plain.parameters(), lr=1e-2, betas=(0.9, 0.99), weight_decay=0.1, fused=True)
        groups = [{"params": list(sharded.parameters()), "weight_decay": 0.1}]
        ours = OffloadedAdamW(groups, lr=1e-2, betas=(0.9, 0.99))
        x = torch.randn(4, 64)
        for _ in range(3):
            for model, optimizer in ((plain, theirs), (sharded, ours)):
                model(x).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        for one, other in zip(sharded.parameters(), plain.parameters()):
            assert isinstance(one, DTensor)
            torch.testing.assert_close(one.full_tensor(), other)
            moment = ours.state[one]["exp_avg"]
            assert isinstance(moment, DTensor)
            torch.testing.assert_close(moment.full_tensor(), theirs.state[other]["exp_avg"])
            ours.give_state(one, ours.state[one])
    finally:
        torch.distributed.destroy_process_group()


def test_without_a_gpu_it_is_refused_with_the_reason():
    config = RunConfig.model_validate({"training": {"cpu_offload_optimizer": True, "device": "cpu"}})
    (problem,) = hardware.problems(config, hardware.detect())
    assert problem.setting == "training.cpu_offload_optimizer" and "host memory" in problem.found


@pytest.mark.parametrize("settings", [{}, {"training.accum_steps": 1, "training.grad_clip": 1.0}], ids=["two", "one"])
def test_memory_of_offloaded_steps_can_be_measured(tiny_config, without_gpu, tmp_path, settings):
    rehearsal = Rehearsal(tiny_config(**{**OFF, **ON, **settings}), tmp_path, torch.device("cpu"))
    assert isinstance(rehearsal.setup.optimizers[-1], OffloadedAdamW)
    account = rehearsal.account(2)
    assert {what for _, what in account.marks} == {"forward pass", "backward pass", "optimizer step"}
