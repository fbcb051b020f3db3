"""The FNO: a model that knows nothing of UPS trains with every phase that applies, and is refused those that do not."""

import pytest
import torch

from upsnb import hardware, overlays, phases
from upsnb.config import ModelConfig
from upsnb.data.spec import DatasetSpec
from upsnb.errors import ConfigError
from upsnb.models import surrogate
from upsnb.models.fno import FNO, FourierBlock
from upsnb.models.wrapped import Wrapped
from upsnb.runs import handle
from upsnb.training.losses import FieldObjective
from upsnb.training.trained import load_model

SETTINGS = {"model": {"build": "upsnb.models.fno:FNO", "settings": {"width": 8, "modes": 4, "depth": 2}}}
SETTINGS |= {"optimizer.name": "adamw"}


@pytest.fixture
def setup(tiny_setup):
    return lambda names=("advection", "darcy"), **overlay: tiny_setup(names, **SETTINGS, **overlay)


def step(setup):
    return setup.step(setup.loader.peek(), 0)[0]


@pytest.mark.parametrize("shape", [(16,), (12, 16), (8, 8, 12)])
def test_a_block_with_all_modes_applies_its_matrix_to_every_wave(shape):
    block = FourierBlock(2, tuple(size // 2 for size in shape))
    with torch.no_grad():
        block.spectral.zero_()
        block.spectral[..., 0] = 3 * torch.eye(2).reshape(2, 2, *(1,) * len(shape))
        for parameter in block.pointwise.parameters():
            parameter.zero_()
    axes = [torch.arange(size) / size for size in shape]
    wave = sum(torch.cos(2 * torch.pi * x) for x in torch.meshgrid(*axes, indexing="ij"))
    torch.testing.assert_close(
        block(wave.expand(1, 2, *shape)), torch.nn.functional.gelu(3 * wave.expand(1, 2, *shape))
    )


@pytest.mark.parametrize("shape", [(16,), (12, 16), (8, 8, 12)])
def test_what_is_transformed_back_is_of_a_real_field(shape, monkeypatch):
    """Else cuFFT and the CPU make different fields of it, and a model is another one where it was not trained."""
    torch.manual_seed(3)
    block, given, back = FourierBlock(3, (2,) * len(shape)), [], torch.fft.irfft
    monkeypatch.setattr(torch.fft, "irfft", lambda x, **options: given.append(x) or back(x, **options))
    x = torch.randn(2, 3, *shape)
    block(x)
    (waves,) = given
    assert not waves[..., 0].imag.any() and waves[..., 0].real.any() and waves[..., 1].imag.any()
    axes = tuple(range(2, x.dim()))
    by_one_call = torch.fft.irfftn(torch.fft.rfftn(x, dim=axes), s=shape, dim=axes)
    torch.testing.assert_close(by_one_call, x)


def test_another_resolution_gives_the_same_function(make_spec):
    spec = make_spec()
    model = Wrapped({"advection": spec}, FNO, ModelConfig(**SETTINGS["model"])).eval()
    draws = torch.Generator().manual_seed(0)

    def fields(size):
        x = (torch.arange(size) + 0.5) / size
        return torch.stack([torch.sin(2 * torch.pi * (x + shift)) for shift in (0.0, 0.1)])[None, :, None]

    parameters = torch.rand(1, 1, generator=draws)
    coarse, fine = (model("advection", fields(size), parameters, spec.dt) for size in (32, 64))
    torch.testing.assert_close(fine.unflatten(-1, (32, 2)).mean(-1), coarse, atol=2e-2, rtol=0)


def test_every_parameter_learns_and_datasets_share_nothing(setup):
    made = setup()
    assert type(made.objective) is FieldObjective
    step(made)
    before = {name: value.clone() for name, value in made.model.state_dict().items()}
    step(made)
    assert all(not torch.equal(value, before[name]) for name, value in made.model.state_dict().items())
    parts = made.model.parts()
    owned = [{id(p) for module in parts[name] for p in module.parameters()} for name in ("advection", "darcy")]
    assert owned[0] | owned[1] == {id(p) for p in made.model.parameters()} and not owned[0] & owned[1]


@pytest.mark.parametrize(
    "phase", [pytest.param("compile", marks=pytest.mark.long), "activation_checkpointing", "bf16", "fused"]
)
def test_a_phase_changes_numbers_as_it_says(setup, phase):
    chosen = phases.BY_NAME[phase]
    made, plain = setup(("advection",)), setup(("advection",))
    made.update(
        overlays.apply(made.config, {**chosen.on, "training.num_workers": 0} if phase == "data_loading" else chosen.on)
    )
    loss, expected = step(made), step(plain)
    if chosen.numerics == "identical":
        assert torch.equal(loss, expected)
    torch.testing.assert_close(loss, expected, rtol=2e-2, atol=0)


def test_recomputing_keeps_fewer_bytes_and_leaves_nothing_behind(setup):
    def kept(made) -> int:
        sizes: dict[int, int] = {}

        def pack(tensor):
            sizes[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            total, _ = made.loss(made.loader.peek()[1], {"relative": 1.0}, None)
        total.backward()
        return sum(sizes.values())

    made = setup()
    plain, on = kept(made), overlays.apply(made.config, phases.BY_NAME["activation_checkpointing"].on)
    off = made.config
    made.update(on)
    assert kept(made) < plain
    made.update(off)
    assert kept(made) == plain and not any("forward" in vars(block) for block in made.model.blocks())


@pytest.mark.parametrize(
    ("overlay", "setting"),
    [
        ({"training.query_sampling.num_queries": 8}, "training.query_sampling"),
        ({"training.lambda_latent_norm": 0.1}, "training.lambda_latent_norm"),
        ({"operator.pdet.attention": "math"}, "operator.pdet.attention"),
        ({"operator.pdet.checkpoint_parts": "mlp"}, "operator.pdet.checkpoint_parts"),
    ],
)
def test_what_it_lacks_is_refused_in_words_at_the_start_and_by_a_flip(setup, overlay, setting):
    with pytest.raises(ConfigError, match=f"{setting}: .+ -> "):
        setup(**overlay)
    made = setup()
    with pytest.raises(ConfigError, match=f"{setting}: .+ -> "):
        made.update(overlays.apply(made.config, overlay))
    assert step(made).isfinite()


class Bare(surrogate.Surrogate):
    """Names no blocks."""

    def __init__(self, specs: dict[str, DatasetSpec]):
        super().__init__(specs)
        self.scale = torch.nn.Parameter(torch.ones(()))

    def predict(self, name, x, parameters, relative_dt, points=None):
        spec = self.specs[name]
        return self.scale * x[:, -1:].expand(-1, spec.output_frames, spec.output_channels, *x.shape[3:])


def test_a_model_without_blocks_is_refused_the_phases_that_need_them(tiny_setup):
    overlay = {"model.build": f"{__name__}:Bare_of", "optimizer.name": "adamw"}
    made = tiny_setup(**overlay)
    with pytest.raises(ConfigError, match="names no blocks"):
        made.update(overlays.apply(made.config, phases.BY_NAME["activation_checkpointing"].on))
    sharded = overlays.apply(made.config, {"training.compile": True, "training.use_fsdp2": True})
    assert ["names no blocks() to compile" in problem.found for problem in made.model.lacks(sharded)] == [True]
    step(made)


def Bare_of(config, specs):
    return Bare(specs)


@pytest.mark.parametrize("name", ["upsnb.models.fno:nothing", "upsnb.models.nowhere:build", "nothing"])
def test_a_model_that_is_not_there_is_named_with_the_remedy(tiny_setup, name):
    with pytest.raises(ConfigError, match="model.build: .+ -> (write package.module:name|it has FourierBlock, FNO)"):
        tiny_setup(**{"model.build": name})


def test_a_whole_run_is_trained_saved_and_loaded(tiny_config, train_here, tmp_path):
    events = train_here(tiny_config(**SETTINGS, **{"stages.operator.epochs": 2, "training.ema_decay": 0.9}), tmp_path)
    assert events[-1]["kind"] == "end" and {event["stage"] for event in events} == {"operator"}
    model = load_model(tmp_path)
    assert isinstance(model.networks["darcy"], FNO)
    y = model("darcy", torch.ones(1, 1, 1, 16, 16), torch.ones(1, 1), 0.0)
    assert y.shape == (1, 1, 1, 16, 16) and y.isfinite().all()


def test_hardware_has_no_objection():
    config = overlays.resolve(SETTINGS)
    hardware.check_runnable(config, hardware.detect())


@pytest.mark.long
def test_two_ranks_train_alike_replicated_and_sharded(tiny_config, tmp_path):
    losses = []
    for sharded in (False, True):
        changes = {"training.num_gpus": 2, "training.use_fsdp2": sharded, "training.batch_size": 4}
        run = handle.start(tiny_config(**SETTINGS, **changes), tmp_path / str(sharded), attached=True)
        run.wait()
        losses.append([event["loss"] for event in run.events(("step",))])
    assert losses[1] == pytest.approx(losses[0], rel=1e-6)
