"""Memory: predictions hold against torch's own allocator, phases change what they should, batches fit as said."""

import dataclasses
import gc
import math
import warnings

import numpy as np
import pytest
import torch
from figure_checks import check

from upsnb import hardware, overlays
from upsnb.data.datasets import open_all, outlines
from upsnb.errors import ConfigError
from upsnb.memory import figures, measure, plan
from upsnb.memory.ledger import FOREVER, KINDS, Account, Ledger
from upsnb.memory.predict import CUDA_GRANULARITY, Predictor, Rehearsal, predict
from upsnb.models import chosen, surrogate
from upsnb.runs import runfolder

WITHIN = 0.03  # of the measurement; the promise is 10 %
PHASES = {
    "as configured": {},
    "activation checkpointing": {"operator.pdet.use_activation_checkpoint": True},
    "bfloat16": {"training.amp": True, "training.amp_dtype": "bfloat16"},
    "scores written out": {"operator.pdet.attention": "math"},
    "inverse losses and average": {
        "training.lambda_inv_enc": 0.1,
        "training.lambda_inv_dec": 0.1,
        "training.inverse_loss_frequency": 4,
        "training.ema_decay": 0.9,
    },
    "accumulation and queries": {"training.accum_steps": 5, "training.query_sampling.num_queries": 20},
    "AdamW alone": {"optimizer.name": "adamw"},
}


@pytest.mark.parametrize(
    "overlay",
    [
        pytest.param(overlay, marks=pytest.mark.long if number > 2 else ())
        for number, overlay in enumerate(PHASES.values())
    ],
    ids=PHASES,
)
def test_prediction_is_what_the_allocator_saw(tiny_config, overlay):
    config = tiny_config(**{"training.batch_size": 32, **overlay})
    predicted, measured = predict(config), measure.measure(config)
    assert predicted.nbytes == pytest.approx(measured.nbytes, rel=WITHIN)
    for kind, nbytes in measured.account.by_kind().items():
        assert predicted.account.by_kind()[kind] == pytest.approx(nbytes, abs=WITHIN * measured.nbytes), kind


def test_measuring_again_in_the_same_process_measures_the_same(tiny_config, monkeypatch):
    config, steps = tiny_config(("darcy",)), Rehearsal.steps
    monkeypatch.setattr(Rehearsal, "steps", lambda *arguments: (gc.collect(), steps(*arguments)))
    assert len({measure.measure(config).nbytes for _ in range(3)}) == 1


def test_prediction_takes_no_memory_no_data_and_no_random_numbers(tiny_config, tmp_path):
    config = tiny_config(**{"data.root": str(tmp_path / "none"), "training.batch_size": 10**6})
    generated = list(tmp_path.rglob("*.hdf5"))
    before = torch.get_rng_state()
    predicted = predict(overlays.apply(config, {"data.root": str(tmp_path / "nowhere")}))
    assert predicted.gib > 100
    assert torch.equal(torch.get_rng_state(), before)
    assert list(tmp_path.rglob("*.hdf5")) == generated


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"operator.encoder": "perceiver", "operator.decoder": "cross_attention"},
        {"operator.decoder": "unpatchify", "operator.pdet.mlp_ratio": 0.1},
        {"operator.fourier_modes": 16},
        {"operator.pdet": {"hidden_dim": 2, "depth": 50, "num_heads": 1}, "latent.dim": 2},
    ],
)
def test_the_bound_that_refuses_a_model_is_below_its_size(tiny_config, values):
    config = tiny_config(**values)
    specs = {name: outline.spec for name, outline in outlines(config, runfolder.project_root()).items()}
    assert hardware.least_parameters(config) <= surrogate.count_parameters(chosen.build(config, specs))


def test_a_model_that_no_machine_could_hold_is_not_even_imagined(tiny_config):
    for values in ({"operator.pdet.depth": 10**8}, {"latent.dim": 2**31 - 2, "operator.pdet.hidden_dim": 2**30}):
        with pytest.raises(ConfigError, match="GiB are there"):
            Predictor(tiny_config(**values))


def test_outline_has_the_shapes_of_the_dataset_it_stands_for(tiny_config):
    config = tiny_config(**{"data.datasets.advection.reduced_resolution": 2})
    opened = open_all(config, runfolder.project_root(), lambda message: None)
    for name, outline in outlines(config, runfolder.project_root()).items():
        real, values = opened[name], {"mean", "std", "dt", "low", "high"}
        assert outline.num_bytes == real.num_bytes
        for field in dataclasses.fields(outline.spec):
            if field.name.rpartition("_")[2] not in values:
                assert getattr(outline.spec, field.name) == getattr(real.spec, field.name), field.name


def test_checkpointing_trades_activations_away(tiny_config):
    one = ("darcy",)
    off, on = (predict(tiny_config(one, **{"operator.pdet.use_activation_checkpoint": on})) for on in (False, True))
    assert on.account.by_kind()["activations"] < 0.7 * off.account.by_kind()["activations"]
    assert on.account.by_kind()["parameters"] == off.account.by_kind()["parameters"]


def test_every_byte_at_the_peak_has_a_kind_and_a_module(tiny_config):
    account = predict(tiny_config()).account
    modules = account.by_module()
    assert sum(account.by_kind().values()) == account.peak()
    assert sum(sum(row.values()) for row in modules.values()) == account.peak()
    model = {"operator.blocks.attention", "operator.blocks.mlp", "encoders.darcy", "decoders.darcy"}
    assert model <= modules.keys()
    assert modules["operator.blocks.mlp"]["activations"] > modules["operator.blocks.mlp"]["parameters"] > 0


def test_offload_frees_adamws_moments_and_nothing_else(tiny_config):
    overlay = {"optimizer.name": "adamw", "training.grad_clip": None}
    plain, offloaded = (
        predict(tiny_config(**overlay, **{"training.cpu_offload_optimizer": on})) for on in (False, True)
    )
    muon, others = Predictor(tiny_config(**overlay)).parameters_by_optimizer()
    assert muon == 0
    assert plain.nbytes - offloaded.nbytes == plain.account.by_kind()["optimizer"] == 8 * others
    assert "AdamW" in offloaded.notes[0]


def test_sharding_divides_what_ranks_share_and_adds_what_they_gather(tiny_config):
    one, four = (
        predict(tiny_config(**{"training.num_gpus": ranks, "training.use_fsdp2": ranks > 1})) for ranks in (1, 4)
    )
    kinds, sharded = one.account.by_kind(), four.account.by_kind()
    assert sharded["optimizer"] == pytest.approx(kinds["optimizer"] / 4, rel=0.02)
    assert sharded["activations"] == kinds["activations"]
    assert kinds["parameters"] / 4 < sharded["parameters"] < 1.5 * kinds["parameters"]


def test_what_is_gathered_is_the_largest_unit_that_is_sharded_and_not_the_largest_block(tiny_config):
    """In 3-D an encoder's kernel is larger than blocks are."""
    wide = {"operator.pdet.depth": 1, "operator.pdet.mlp_ratio": 0.5, "latent.dim": 256, "operator.pdet.hidden_dim": 16}
    wide |= {"operator.pdet.num_heads": 1, "training.num_gpus": 2, "training.use_fsdp2": True}
    predictor = Predictor(tiny_config(("darcy",), **wide))
    model = predictor._rehearsal.setup.model
    (block,) = model.blocks()
    sizes = [sum(p.nbytes for p in part.parameters()) for part in (block, *model.parts()["darcy"])]
    assert max(sizes) > sizes[0] and predictor._gathered_bytes() >= 3 * max(sizes)


def test_gradients_that_are_summed_up_before_they_are_sent_lie_beside_what_sends_them(tiny_config):
    several = {"training.num_gpus": 2, "training.accum_steps": 2}
    apart, together = (predict(tiny_config(**several, **{"training.no_sync": on})) for on in (True, False))
    difference = apart.account.by_kind()["gradients"] - together.account.by_kind()["gradients"]
    assert 0.9 < difference / together.account.by_kind()["parameters"] < 1, "all but buffers"


def test_several_ranks_keep_their_gradients_from_the_start(tiny_config):
    account = predict(tiny_config(**{"training.num_gpus": 2})).account
    gradients = account.timeline()[1][:, KINDS.index("gradients")]
    assert gradients.min() == gradients.max() > 0


# -- the largest batch ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def lines():
    """A predictor by formula: two straight lines in the batch, the steeper one above 10 pairs."""

    class Lines:
        def __init__(self, start):
            self.config = overlays.resolve({"training.batch_size": start})
            self.seen = {}

        def at(self, batch):
            nbytes = max(1000, 500 + 50 * batch)
            self.seen = dict(sorted({**self.seen, batch: type("F", (), {"nbytes": nbytes})}.items()))
            return self.seen[batch]

    return Lines


@pytest.mark.parametrize("start", [1, 4, 8, 64])
def test_largest_batch_is_the_largest_that_fits(lines, start):
    capacities = {"tiny": 900, "flat": 1000, "small": 1010, "middle": 7777, "large": 10**7}
    expected = {"tiny": 0} | {name: (size - 500) // 50 for name, size in capacities.items() if name != "tiny"}
    found = plan.largest_batches(lines(start), capacities)
    assert found["large"] == expected["large"] and found["tiny"] == 0
    for name, batch in found.items():  # between two predictions a batch may be too careful, never too large
        assert batch <= expected[name]
    assert found["middle"] >= 0.9 * expected["middle"]


@pytest.mark.long
def test_batch_found_for_a_gpu_fits_and_one_more_pair_does_not(tiny_config):
    predictor = Predictor(tiny_config(("advection",)), granularity=CUDA_GRANULARITY)
    capacity = 3 * predictor.at().nbytes
    batch = plan.largest_batches(predictor, {"gpu": capacity})["gpu"]
    assert predictor.at(batch).nbytes <= capacity < predictor.at(batch + 1).nbytes


def test_batches_are_shown_with_two_digits_and_never_rounded_up():
    sizes = {"a": 0, "b": 7, "c": 99, "d": 199, "e": 10_999, "f": 100_000}
    shown = plan.fits_table([{"phases": "all", "gpu": gpu, "batch_size": size} for gpu, size in sizes.items()])
    assert shown.loc["all"].to_dict() == {"a": 0, "b": 7, "c": 99, "d": 190, "e": 10_000, "f": 100_000}


def test_variants_flip_each_phase_once_and_are_valid(tiny_config):
    made, impossible = plan.variants(tiny_config(**{"operator.pdet.use_activation_checkpoint": True}))
    assert not impossible
    assert not made["without activation_checkpointing"].operator.pdet.use_activation_checkpoint
    assert made["optimizer_offload"].training.cpu_offload_optimizer
    assert made[plan.ALL_PHASES].training.use_fsdp2 and made[plan.ALL_PHASES].training.num_gpus == 2


@pytest.mark.slow
def test_claims_cannot_hold_for_the_reference_model():
    predictor = Predictor(overlays.load(runfolder.project_root() / "params" / "memory_reference.yaml"))
    claimed = plan.claims(predictor)
    assert all(claim["at_most_gb"] < 0.1 * claim["promised_gb"] for claim in claimed if claim["promised_gb"])
    assert predictor.parameters_by_optimizer()[0] == pytest.approx(21.4e6, rel=0.02)
    assert claimed[-1]["at_most_gb"] > claimed[1]["at_most_gb"]  # activations outweigh what could be offloaded


# -- the parts -------------------------------------------------------------------------------------------------------


def test_ledger_sees_storages_come_go_and_be_shared():
    model = torch.nn.Linear(4, 4)
    with Ledger(model, torch.device("cpu")) as ledger:
        kept = torch.zeros(100)
        view = kept[:50].reshape(5, 10)
        torch.ones(1000)
        del view
    account = ledger.account()
    assert account.peak() == 4400
    assert sorted(account.nbytes[account.nbytes >= 400]) == [400, 4000]
    assert account.died[account.nbytes == 4000] < FOREVER and account.died[account.nbytes == 400] == FOREVER
    assert kept.sum() == 0 and not model._forward_hooks and not model._forward_pre_hooks


def test_account_arithmetic_changes_only_the_kind_it_names():
    activations, gradients = KINDS.index("activations"), KINDS.index("gradients")
    account = Account(
        nbytes=np.array([100, 10, 30]),
        born=np.array([1, 3, 5]),
        died=np.array([4, FOREVER, FOREVER]),
        kind=np.array([activations, gradients, gradients]),
        module=np.array([0, 0, 0]),
        modules=("m",),
        marks=(),
        end=6,
    )
    assert account.peak() == 110
    assert account.kept("gradients").peak() == 140
    assert account.scaled("gradients", 0.5).peak() == 105
    assert account.rounded(64).peak() == 192
    assert account.plus("data", "batch", 7).peak() == 117
    assert account.by_kind()["activations"] == 100


def trace(*events):
    frames = [
        {"filename": "/lib/torch/nn/functional.py", "line": 1, "name": "linear"},
        {"filename": "/home/upsnb/losses.py", "line": 7, "name": "forward"},
    ]
    return [dict(zip(("action", "addr", "size", "time_us"), event)) | {"frames": frames} for event in events]


def test_cuda_history_tells_what_was_alive_when_memory_ran_out():
    told = measure.history(
        trace(
            ("segment_alloc", 0, 10**6, 1000),
            ("free_completed", 99, 5, 1000),  # older than the recording
            ("alloc", 1, 100, 1000),
            ("alloc", 2, 300, 2000),
            ("free_requested", 1, 100, 2500),
            ("free_completed", 1, 100, 3000),
            ("alloc", 3, 50, 4000),
            ("oom", 0, 999, 5000),
            ("free_completed", 2, 300, 6000),
        )
    )
    assert told["allocated_bytes"] == [100, 400, 300, 350, 350, 50]
    assert told["time_ms"] == [0, 1, 2, 3, 4, 5]
    assert told["out_of_memory"] == {"requested_bytes": 999, "free_bytes": None, "index": 4}
    assert told["largest"] == [{"nbytes": size, "where": "losses.py:7 forward"} for size in (300, 50)]


def test_modules_that_hold_next_to_nothing_are_one_bar():
    sizes = {"large": 10**6, "small": 10**4, **{f"tiny {i}": 10 * (9 - i) for i in range(9)}}
    table = {name: dict.fromkeys(KINDS, 0) | {"activations": size} for name, size in sizes.items()}
    figure = figures.by_module(table)
    check(figure)
    (ax,) = figure.axes
    assert [tick.get_text() for tick in ax.get_yticklabels()] == ["large", "small", "9 others"]
    assert [text.get_text() for text in ax.texts] == ["99%", "1%", "less than 0.5%"]


def test_torch_says_nothing_about_kernels_while_a_step_is_rehearsed(tiny_config):
    config = tiny_config(("darcy",), **{"training.amp": True, "training.amp_dtype": "bfloat16"})
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "Mismatch dtype")
        assert measure.measure(config).nbytes > 0 and predict(config).nbytes > 0


def test_figures_name_axes_units_and_totals(tiny_config):
    predicted = predict(tiny_config())
    rows = [
        {"config": "as configured", "predicted": predicted, "measured": predicted, "reason": ""},
        {"config": "all_phases", "predicted": predicted, "measured": None, "reason": "no GPU"},
    ]
    table = plan.fits_table(
        [{"phases": "a", "gpu": gpu, "batch_size": size} for gpu, size in (("T4", 0), ("L4", 7), ("H200", 12345))]
    )
    history = measure.history(trace(("alloc", 1, 2**20, 0), ("oom", 0, 2**30, 9)))
    drawn = (
        figures.predicted_beside_measured(figures.bars(rows)),
        figures.through_a_step(predicted.account),
        figures.by_module(predicted.account.by_module()),
        figures.largest_batch(table),
        figures.cuda_history(history),
        figures.cuda_history(measure.history([]), title="as configured"),
    )
    for figure in drawn:
        check(figure)
        for ax in figure.axes:
            named = [text for text in (ax.get_xlabel(), ax.get_ylabel()) if text]
            assert named and all(text.endswith("]") for text in named), named
    texts = [text.get_text() for text in drawn[0].axes[0].texts]
    assert "(+0.0 %)" in texts[0] and "not measured" in texts[1]
    assert {"none", "7", "12,000"} <= {text.get_text() for text in drawn[3].axes[0].texts}
    assert math.isclose(float(drawn[1].axes[0].texts[0].get_text().split()[0]), predicted.nbytes / 2**10, rel_tol=0.01)
