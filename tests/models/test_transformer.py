"""The operator: attention is one result whatever computes it, and recomputed activations are the same numbers."""

import pytest
import torch

from upsnb import hardware
from upsnb.config import PdetConfig, RunConfig
from upsnb.hardware import Hardware
from upsnb.models.surrogate import set_attention, set_checkpointing
from upsnb.models.transformer import Attention, Operator, attend, rotary_table

CPU = Hardware("cpu", 1, "processor", 8.0, 2)
A100 = Hardware("cuda", 1, "A100", 80.0, 8, (8, 0))
T4 = Hardware("cuda", 1, "T4", 15.0, 2, (7, 5))
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
dtypes = pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
backends = pytest.mark.parametrize("backend", ["flash", "math"])


@pytest.mark.parametrize(("dims", "head_dim", "turned"), [(1, 2, 1), (2, 2, 1), (3, 2, 1), (3, 4, 2), (3, 6, 3)])
def test_heads_too_narrow_for_all_axes_know_of_the_first_ones(dims, head_dim, turned):
    places = torch.rand(24, dims)
    cos, sin = rotary_table(places, (True,) * dims, head_dim)
    assert cos.shape == sin.shape == (24, head_dim // 2)
    for axis in range(dims):
        moved = places.clone()
        moved[:, axis] += 0.3
        assert torch.equal(rotary_table(moved, (True,) * dims, head_dim)[0], cos) == (axis >= turned)


def run(backend: str, dtype: torch.dtype, compiled: bool = False) -> list[torch.Tensor]:
    """Output and gradients of one attention layer under autocast to `dtype`."""
    torch.manual_seed(0)
    layer, x = Attention(32, 2, qk_norm=True, backend=backend), torch.randn(3, 24, 32, requires_grad=True)
    call = torch.compile(layer, backend="aot_eager") if compiled else layer
    with torch.autocast("cpu", dtype=dtype, enabled=dtype != torch.float32):
        y = call(x, rotary_table(torch.rand(24, 1), (True,), 16))
    y.float().square().mean().backward()
    return [y.detach().float(), x.grad, *(p.grad for p in layer.parameters())]


@backends
@dtypes
@pytest.mark.parametrize("compiled", [False, True])
def test_backends_agree_in_output_and_gradients(backend, dtype, compiled):
    for found, expected in zip(run(backend, dtype, compiled), run("sdpa", dtype), strict=True):
        assert (found - expected).norm() <= TOLERANCE[dtype] * expected.norm()


def test_blocks_add_to_what_autocast_does_not_round(perturb):
    """In a stream of bfloat16, each block's change would be rounded to 8 bits of all that stands there already."""
    net = perturb(Operator(PdetConfig(hidden_dim=32, depth=3, num_heads=2), 16, 8))
    seen = []
    for block in net.blocks:
        block.register_forward_hook(lambda _, given, returned: seen.extend((given[0].dtype, returned.dtype)))
    with torch.autocast("cpu", torch.bfloat16):
        assert net(torch.randn(2, 24, 16), torch.randn(2, 8), None).dtype == torch.float32
    assert seen == 6 * [torch.float32]


@pytest.mark.parametrize("compiled", [False, True])
def test_probabilities_in_16_bits_are_summed_up_in_float32(compiled):
    """Summed up in bfloat16, 4,096 equal scores would stop at 256, and sixteen times too much come out."""
    call = torch.compile(attend, backend="aot_eager") if compiled else attend
    q, k, v = torch.randn(3, 1, 2, 4096, 16, dtype=torch.bfloat16)
    assert torch.equal(call(torch.zeros_like(q[:, :, :8]), k, torch.ones_like(v), "math"), torch.ones(1, 2, 8, 16))
    scores = (q[:, :, :8] / 4) @ k.transpose(-1, -2)
    whole = torch.softmax(scores, -1, dtype=torch.float32).bfloat16() @ v
    assert torch.equal(call(q[:, :, :8], k, v, "math"), whole)


@pytest.mark.long
def test_the_generated_kernel_of_flex_attention_gives_the_same_forward():
    q, k, v = torch.randn(3, 2, 2, 24, 16)
    with torch.no_grad():
        torch.testing.assert_close(attend(q, k, v, "flex"), attend(q, k, v, "math"), atol=1e-5, rtol=1e-5)


def test_evaluation_runs_where_the_training_kernel_cannot():
    layer, x = Attention(32, 2, qk_norm=True, backend="efficient"), torch.randn(1, 8, 32)
    with pytest.raises(RuntimeError, match="No .*backend|No .*kernel"):
        layer.train()(x, None)
    found = layer.eval()(x, None)
    layer.backend = "sdpa"
    assert torch.equal(found, layer(x, None))


def test_an_operator_changes_all_its_blocks_and_no_name(make_spec, make_model):
    model = make_model([make_spec()])
    names = list(model.state_dict())
    set_attention(model.blocks(), "math")
    assert {block.attention.backend for block in model.operator.blocks} == {"math"}
    assert list(model.state_dict()) == names


@pytest.mark.parametrize(
    ("backend", "machine", "training", "reason"),
    [
        ("flex", CPU, {}, "no backward pass on the CPU"),
        ("efficient", CPU, {}, "kernel is CUDA's"),
        ("flash", CPU, {}, None),
        ("math", CPU, {}, None),
        ("flash", A100, {}, "computes in float32"),
        ("flash", A100, {"amp": True, "amp_dtype": "float32"}, "computes in float32"),
        ("flash", A100, {"amp": True, "amp_dtype": "bfloat16"}, None),
        ("flash", T4, {"amp": True, "amp_dtype": "float16"}, "needs 8.0 and T4 has compute capability 7.5"),
        ("efficient", T4, {}, None),
        ("flex", A100, {}, None),
    ],
)
def test_what_the_device_cannot_do_is_refused_with_the_reason(backend, machine, training, reason):
    config = RunConfig.model_validate({"operator": {"pdet": {"attention": backend}}, "training": training})
    problems = hardware.problems(config, machine)
    assert bool(problems) == bool(reason)
    if reason:
        assert problems[0].setting == "operator.pdet.attention" and reason in problems[0].found and problems[0].remedy


# -- activation checkpointing ------------------------------------------------------------------------------------------

SHAPE = (3, 16, 32)


@pytest.fixture
def operator(perturb):
    torch.manual_seed(0)
    config = PdetConfig(hidden_dim=32, depth=4, num_heads=2, mlp_ratio=2.0, drop_path=0.3)
    return perturb(Operator(config, 32, 8)).train()


def backward(operator: Operator) -> tuple[int, torch.Tensor, list[torch.Tensor]]:
    """Bytes that autograd keeps for one backward, the loss, and the gradients."""
    generator = torch.Generator().manual_seed(1)
    z, condition = torch.randn(SHAPE, generator=generator), torch.randn(3, 8, generator=generator)
    kept: dict[int, int] = {}

    def pack(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    torch.manual_seed(5)  # drop-path draws
    operator.zero_grad()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = operator(z, condition, None).square().mean()
    loss.backward()
    return sum(kept.values()), loss.detach(), [p.grad.clone() for p in operator.parameters() if p.grad is not None]


def on(**changes) -> PdetConfig:
    return PdetConfig(use_activation_checkpoint=True, **changes)


@pytest.mark.parametrize("parts", ["all", "attention", "mlp"])
@pytest.mark.parametrize("every", [1, 2])
def test_recomputing_changes_no_number_and_keeps_fewer_bytes(operator, parts, every):
    plain_bytes, plain_loss, plain_gradients = backward(operator)
    set_checkpointing(operator.blocks, on(checkpoint_parts=parts, checkpoint_every=every))
    kept, loss, gradients = backward(operator)
    assert kept < plain_bytes
    assert torch.equal(loss, plain_loss)
    assert all(torch.equal(a, b) for a, b in zip(gradients, plain_gradients, strict=True))


def test_more_recomputation_keeps_fewer_bytes(operator):
    def kept(**changes) -> int:
        set_checkpointing(operator.blocks, on(**changes))
        return backward(operator)[0]

    assert kept() < kept(checkpoint_every=2) < kept(checkpoint_every=4)
    assert kept() < kept(checkpoint_parts="attention")
    assert kept() < kept(checkpoint_parts="mlp")


def test_switched_off_it_leaves_nothing_behind(operator):
    before = backward(operator)[0]
    set_checkpointing(operator.blocks, on())
    set_checkpointing(operator.blocks, PdetConfig())
    assert backward(operator)[0] == before
