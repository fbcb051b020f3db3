"""Attention backends: one result, whatever computes it, and a reason where none can."""

import pytest
import torch

from upsnb import hardware
from upsnb.config import RunConfig
from upsnb.hardware import Hardware
from upsnb.models.surrogate import set_attention
from upsnb.models.transformer import Attention, attend, rotary_table

CPU = Hardware("cpu", 1, "processor", 8.0, 2)
A100 = Hardware("cuda", 1, "A100", 80.0, 8, (8, 0))
T4 = Hardware("cuda", 1, "T4", 15.0, 2, (7, 5))
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
dtypes = pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
backends = pytest.mark.parametrize("backend", ["flash", "math"])


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


@pytest.mark.slow
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
        ("flash", T4, {"amp": True, "amp_dtype": "float16"}, "compute capability 8.0 and T4 has 7.5"),
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
