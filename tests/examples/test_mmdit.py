"""Pictures from captions: scenes that are what captions say, a judge that is told nothing, a model that learns."""

import math

import numpy as np
import pytest
import torch

from examples.mmdit import data, judge
from examples.mmdit import figures as example_figures
from examples.mmdit.model import SHIFT, Block, BucketSpec, MMDiT, Shape, noise, sample, shifted
from examples.mmdit.workload import SIZES, FlowObjective, logit_normal, middle_times
from upsnb import overlays
from upsnb.errors import ConfigError, DataError
from upsnb.memory.predict import predict
from upsnb.models.transformer import rotary_table
from upsnb.report import figures
from upsnb.runs import runfolder
from upsnb.training import compiling
from upsnb.training.compiling import CompileCounter
from upsnb.training.workload import of as workload_of

EXAMPLE = "mmdit"


# -- pictures and their judge ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize(("noise", "least"), [(0.0, 1.0), (0.1, 0.95)])
def test_the_judge_finds_what_captions_say_in_true_pictures_clean_or_noised(size, noise, least):
    pictures, tokens = data.generate(60, size, seed=3)
    noised = pictures / 255 + noise * np.random.default_rng(0).normal(size=pictures.shape)
    found = [judge.verdict(data.decode(ids), picture) for ids, picture in zip(tokens, noised.clip(0, 1))]
    for name in judge.ATTRIBUTES:
        values = [one[name] for one in found if name in one]
        assert len(values) >= 10 and np.mean(values) >= least, name


@pytest.mark.parametrize(
    ("attribute", "true", "wrong"),
    [
        ("colour", "two red circles", "two blue circles"),
        ("count", "two red circles", "three red circles"),
        ("shape", "two red circles", "two red squares"),
        ("relation", "a red circle left of a blue square", "a red circle right of a blue square"),
        ("relation", "a red circle left of a blue square", "a red circle above a blue square"),
        ("shape", "a red circle left of a blue square", "a red square left of a blue circle"),
    ],
)
def test_the_judge_misses_just_the_attribute_that_is_wrong(attribute, true, wrong):
    picture = data.render(_things(true), 0.2, (32, 32))
    assert all(judge.verdict(true, picture).values())
    assert [name for name, right in judge.verdict(wrong, picture).items() if not right] == [attribute]


def _things(caption: str) -> tuple[data.Thing, ...]:
    """A scene with this caption, in fixed places of a picture of 32 x 32 pixels."""
    words = [word.removesuffix("s") for word in caption.split()]
    colours, shapes = ([word for word in words if word in known] for known in (data.COLOURS, data.SHAPES))
    count = data.NUMBERS.index(words[0]) + 1
    looks = list(zip(shapes, colours)) if len(colours) > 1 else list(zip(shapes, colours)) * count
    return tuple(data.Thing(*look, 6.0 + 10 * i, 8.0 + 3 * i, 3.5) for i, look in enumerate(looks))


@pytest.mark.parametrize(
    "caption", ["green triangles", "three triangles", "red", "a red circle a blue square a red circle", ""]
)
def test_a_caption_that_cannot_be_judged_is_refused(caption):
    with pytest.raises(DataError, match="cannot be judged -> say it like"):
        judge.verdict(caption, np.full((3, 32, 32), 0.2))


@pytest.mark.parametrize("picture", ["empty", "noise", "blob", "grey shape", "too faint"])
def test_the_judge_finds_nothing_that_is_not_there(picture):
    draws, plain = np.random.default_rng(0), np.full((3, 32, 32), 0.2)
    ring = data.coverage("circle", 16, 16, 9, (32, 32)) - data.coverage("circle", 16, 16, 6, (32, 32))
    shown = {
        "empty": plain,
        "noise": draws.random((3, 32, 32)) * 0.3,
        "blob": plain + ring * (np.array(data.COLOURS["red"]).reshape(3, 1, 1) - plain),
        "grey shape": plain + 0.5 * data.coverage("circle", 16, 16, 5, (32, 32)),
        "too faint": plain
        + 0.15 * np.array([1, -1, -1]).reshape(3, 1, 1) * data.coverage("square", 16, 16, 4, (32, 32)),
    }[picture]
    things = judge.read(shown)
    assert not any(thing.shape and thing.colour for thing in things), things
    assert not any(judge.verdict("a red circle", shown)[name] for name in ("shape", *["count"] * (picture != "blob")))


def test_captions_are_true_balanced_and_the_same_for_a_seed():
    pictures, tokens = data.generate(300, (32, 32), seed=0)
    again = data.generate(300, (32, 32), seed=0)
    assert np.array_equal(pictures, again[0]) and np.array_equal(tokens, again[1])
    assert not np.array_equal(pictures, data.generate(300, (32, 32), seed=1)[0])
    captions = [data.decode(ids) for ids in tokens]
    assert all(data.encode(caption) == ids.tolist() for caption, ids in zip(captions, tokens))
    related = [caption for caption in captions if caption.split()[-2] in data.COLOURS and len(caption.split()) > 5]
    assert 0.4 < len(related) / 300 < 0.6
    for words in (data.COLOURS, data.SHAPES, ("left of", "right of", "above", "below")):
        assert min(sum(word in caption for caption in captions) for word in words) > 300 / len(words) / 8


# -- model and loss -------------------------------------------------------------------------------------------------


def make_model(perturb=lambda model: model) -> MMDiT:
    specs = {name: BucketSpec(name, size, (0.2, 0.3, 0.1), (0.1, 0.2, 0.3)) for name, size in SIZES.items()}
    torch.manual_seed(0)
    return perturb(MMDiT(specs, Shape(width=16, depth=2, num_heads=2))).eval()


def inputs(size=(32, 32), count=4):
    draws = torch.Generator().manual_seed(1)
    tokens = torch.tensor(data.generate(count, size, 0)[1])
    return torch.randn(count, 3, *size, generator=draws), torch.rand(count, generator=draws), tokens


def test_both_streams_read_each_other(perturb):
    block = perturb(Block(16, 2, 32, last=False))
    picture, caption, condition = torch.randn(1, 6, 16), torch.randn(1, 4, 16), torch.randn(1, 16)
    rest = condition, rotary_table(torch.rand(6, 2), (False, False), 8)
    before = block(picture, caption, *rest)
    nudged = block(picture, caption + torch.eye(4, 16)[None], *rest)
    assert (nudged[0] - before[0]).abs().amax(-1).min() > 1e-6, "every token of the picture reads the caption"
    shifted = block(picture + torch.eye(6, 16)[None], caption, *rest)
    assert (shifted[1] - before[1]).abs().amax(-1).min() > 1e-6, "every word reads the picture"


def test_a_new_block_hands_on_what_it_was_given():
    picture, caption = torch.randn(2, 6, 16), torch.randn(2, 4, 16)
    table = rotary_table(torch.rand(6, 2), (False, False), 8)
    for last in (False, True):
        made = Block(16, 2, 32, last)(picture, caption, torch.randn(2, 16), table)
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(made, (picture, caption)))


def test_a_patch_is_told_where_it_lies_and_not_only_how_far_others_are(perturb):
    model = make_model(perturb)
    for block in model.trunk:  # nothing comes from other tokens: what differs is the patch's own
        for output in block.attention.outputs:
            torch.nn.init.zeros_(output.weight)
    y = model("square", torch.ones(1, 3, 32, 32), torch.ones(1), inputs(count=1)[2])
    patches = torch.nn.functional.pixel_unshuffle(y, model.patch).flatten(2)[0].T
    assert (torch.cdist(patches, patches) + torch.eye(len(patches))).min() > 1e-4


def test_places_words_and_time_all_matter(perturb):
    model, (z, time, tokens) = make_model(perturb), inputs()
    said = model("square", z, time, tokens)
    assert said.shape == z.shape and said.dtype == torch.float32
    assert not torch.allclose(said, model("square", z, time, tokens.roll(1, 0)), atol=1e-5)
    assert not torch.allclose(said, model("square", z, 1 - time, tokens), atol=1e-5)
    turned = model("square", z.flip(3), time, tokens).flip(3)
    assert not torch.allclose(said, turned, atol=1e-5)
    moved = model("square", z.roll(4, 3), time, tokens).roll(-4, 3)  # whole patches: what is in them stays
    assert not torch.allclose(said, moved, atol=1e-5)
    left, right = (
        torch.tensor([data.encode(f"a red circle {where} of a blue square")] * 4) for where in ("left", "right")
    )
    assert not torch.allclose(model("square", z, time, left), model("square", z, time, right), atol=1e-6)
    swapped = torch.tensor([data.encode("a blue square left of a red circle")] * 4)
    assert not torch.allclose(model("square", z, time, left), model("square", z, time, swapped), atol=1e-6), (
        "the order of words matters"
    )


def test_a_batch_is_no_more_than_its_rows(perturb):
    model, (z, time, tokens) = make_model(perturb), inputs()
    rows = torch.cat([model("square", z[i : i + 1], time[i : i + 1], tokens[i : i + 1]) for i in range(4)])
    torch.testing.assert_close(model("square", z, time, tokens), rows, rtol=1e-4, atol=1e-5)


def test_the_loss_is_zero_for_the_true_velocity_alone():
    model, (noise, time, tokens) = make_model(), inputs()
    pictures = torch.from_numpy(data.generate(4, (32, 32), 0)[0])
    objective, x = FlowObjective(model, None, 0.0), model.normalise("square", pictures)
    model.forward = lambda name, z, times, words: x
    late = time.clamp_min(0.06)  # earlier, velocities are those of time 0.05
    assert objective.flow("square", pictures, tokens, late, noise).item() == pytest.approx(0, abs=1e-8)
    model.forward = lambda name, z, times, words: x + 0.1 * times.view(-1, 1, 1, 1)
    assert objective.flow("square", pictures, tokens, late, noise).item() == pytest.approx(0.01, rel=1e-3)
    torch.testing.assert_close(model.denormalise("square", x), pictures / 255)


def test_times_have_normal_logits_on_the_side_of_noise():
    times = logit_normal(torch.rand(20_000, generator=torch.Generator().manual_seed(0)))
    logits = torch.logit(times)
    assert abs(logits.mean() - math.log(SHIFT)) < 0.03 and abs(logits.std() - 1) < 0.03
    assert logit_normal(torch.zeros(1)).item() == 0 and torch.equal(middle_times(), middle_times().sort().values)


def test_a_share_of_captions_is_left_out_and_it_is_the_pairs_own(setup):
    made = setup(**{"data.workload_settings.caption_dropout": 0.25, "training.batch_size": 4})
    objective, seen = made.objective, []
    objective.flow = lambda name, pictures, tokens, time, drawn: seen.append((tokens, time)) or torch.zeros(())
    batch = made.loader.peek()[0]
    batch.draws = torch.tensor([[0.1, 0.0], [0.5, 0.24], [0.5, 0.26], [0.9, 0.99]])
    objective.terms(batch, {"flow": 1.0})
    (tokens, time), none = seen[0], torch.tensor(data.encode(data.NO_CAPTION))
    assert [torch.equal(ids, none) for ids in tokens] == [True, True, False, False]
    middle = shifted(torch.tensor(0.5))
    assert torch.equal(tokens[2:], batch.tokens[2:]) and time[1] == time[2] == middle and time[0] < middle < time[3]


# -- sampling -------------------------------------------------------------------------------------------------------


class Straight:
    """Knows the picture of each caption, and of none."""

    def __init__(self, pictures, unknown):
        self.pictures, self.unknown = pictures, unknown

    def velocity(self, name, z, time, tokens):
        none = torch.tensor(data.encode(data.NO_CAPTION))
        of = torch.stack([self.unknown if torch.equal(ids, none) else self.pictures[int(ids[1])] for ids in tokens])
        return (z - of) / time.view(-1, 1, 1, 1)

    def denormalise(self, name, x):
        return x


class Curved(Straight):
    """A velocity that changes with time."""

    def velocity(self, name, z, time, tokens):
        return 0.9 * time.view(-1, 1, 1, 1) ** 2 + 0 * z


class Normal(Straight):
    """Knows that pixels are standard normal before they become 0.5 +- 0.1, and nothing else."""

    def velocity(self, name, z, time, tokens):
        time = time.view(-1, 1, 1, 1)
        return (z - z * (1 - time) / ((1 - time) ** 2 + time**2)) / time

    def denormalise(self, name, x):
        return 0.5 + 0.1 * x


@pytest.mark.parametrize("draws", [1, 5])
def test_samples_reach_the_picture_and_guidance_goes_beyond_it(draws):
    pictures, unknown = {0: torch.full((3, 4, 4), 0.6), 1: torch.full((3, 4, 4), 0.3)}, torch.full((3, 4, 4), 0.5)
    tokens, drawn = torch.tensor([[2, 0], [2, 1]]), torch.randn(draws, 2, 3, 4, 4)
    tokens = torch.cat((tokens, torch.zeros(2, data.LENGTH - 2, dtype=torch.long)), dim=1)
    for guidance, expected in ((1.0, (0.6, 0.3)), (2.0, (0.7, 0.1)), (0.0, (0.5, 0.5))):
        found = sample(Straight(pictures, unknown), "square", tokens, drawn, 5, guidance)
        for picture, value in zip(found, expected):
            torch.testing.assert_close(picture, torch.full_like(picture, value), rtol=1e-3, atol=1e-3)


def test_without_new_noise_a_step_is_of_first_order():
    model, z, tokens = Curved({}, None), torch.full((1, 1, 3, 2, 2), 0.5), torch.zeros(1, data.LENGTH, dtype=torch.long)
    coarse, fine = (abs(sample(model, "x", tokens, z, steps, 1.0).mean().item() - (0.5 - 0.3)) for steps in (16, 32))
    assert 1.8 < coarse / fine < 2.3


@pytest.mark.parametrize("ancestral", [False, True])
def test_samples_are_as_far_apart_as_pictures_are(ancestral):
    """New noise comes in only as far as old noise goes out: neither blurred nor grainy."""
    steps, tokens = 300, torch.zeros(64, data.LENGTH, dtype=torch.long)
    drawn = noise((8, 8), range(64), draws=steps if ancestral else 1)
    pixels = sample(Normal({}, None), "x", tokens, drawn, steps, 1.0)
    assert pixels.mean().item() == pytest.approx(0.5, abs=0.005)
    assert pixels.std().item() == pytest.approx(0.1, rel=0.03)


def test_a_sample_is_the_same_whatever_is_drawn_beside_it(setup, perturb):
    made = setup()
    model, workload = perturb(made.model).eval(), workload_of(made.config)
    tokens = made.datasets["wide"].tokens
    together = workload.draw(model, "wide", torch.from_numpy(tokens[3:6]), [3, 4, 5])
    alone = workload.draw(model, "wide", torch.from_numpy(tokens[4:5]), [4])
    torch.testing.assert_close(together[1:2], alone, rtol=1e-4, atol=1e-4)
    assert together.min() >= 0 and together.max() <= 1 and together.shape == (3, 3, 12, 40)
    assert not torch.allclose(workload.draw(model, "wide", torch.from_numpy(tokens[4:5]), [4], seed=1), alone)


# -- as a workload --------------------------------------------------------------------------------------------------


def test_every_weight_of_the_model_is_trained(setup):
    made = setup()
    before = {name: value.clone() for name, value in made.model.state_dict().items()}
    made.set_learning_rate(0.5)
    for step in range(4):  # gates and output begin at zero: what is behind them waits
        made.step(made.loader.peek(), step)
    assert not {name for name, value in made.model.state_dict().items() if torch.equal(value, before[name])}


def test_no_microbatch_leaves_a_weight_without_a_gradient(setup, perturb):
    """DDP would wait for it."""
    made = setup()
    perturb(made.model)
    for batch in made.loader.peek():
        made.objective(batch, {"flow": 1.0}, None)[0].backward()
        assert not [name for name, parameter in made.model.named_parameters() if parameter.grad is None]
        made.model.zero_grad(set_to_none=True)


@pytest.mark.slow
def test_compiled_there_is_a_graph_for_each_shape_and_never_another(setup, monkeypatch):
    monkeypatch.setattr(compiling, "BACKEND", "aot_eager")  # all of the compiler but its code generation
    made = setup(
        **{"training.compile": True, "data.workload_settings.buckets": {"a": [20, 20], "b": [12, 40], "c": [40, 12]}}
    )
    counter = CompileCounter()
    for step in range(2):
        made.step(made.loader.peek(), step)
    first = counter.read()
    assert first.graph_breaks == 0
    # the last block, which hands no caption on, is code of its own; 25, 30 and 30 tokens are two shapes
    assert first.graphs == 2 * 2
    for step in range(2, 5):
        made.step(made.loader.peek(), step)
    assert counter.read().graphs == 0


def test_memory_needs_no_pictures(setup, tmp_path, monkeypatch):
    config = setup().config
    monkeypatch.setattr(data, "generate", None)
    small = predict(config, tmp_path).nbytes
    assert predict(overlays.resolve({"training.batch_size": 32}, base=config), tmp_path).nbytes > 2 * small > 0


@pytest.mark.parametrize(
    ("overlay", "said"),
    [
        ({"data.workload_settings.guidence": 2.0}, "guidence"),
        ({"model.settings.depths": 2}, "depths"),
        ({"data.workload_settings.buckets": {"small": [16, 16]}}, "small .* no room for 4 things -> "),
        ({"data.workload_settings.buckets": {"odd": [30, 32]}}, "odd .* patches of 4"),
        ({"model.settings.num_heads": 3}, "16 .* 3 heads"),
    ],
)
def test_settings_that_cannot_be_are_refused_in_words(setup, overlay, said):
    with pytest.raises(ConfigError, match=said):
        setup(**overlay)


def test_a_run_reports_and_draws_what_its_samples_show(finished):
    run = finished(EXAMPLE)
    found = figures.RunFigures.of(run).results
    assert set(found) == {"square", "wide"}
    for result in found.values():
        assert result["num_samples"] == 4 and 0 <= result["error"] <= 1
        assert result["error"] == pytest.approx(np.mean(result["per_sample"]["error"]))
        assert 0.2 < result["baseline_error"] <= 1, "a picture of another caption shows little of this one"
        assert result["flow"] == pytest.approx(np.mean(result["flow_by_time"]["flow"]))
    assert len(example_figures.true_samples(workload_of(run.config).open(run.folder, print), count=3).png) > 5000
    assert len(example_figures.ask(run, "wide", ["two red circles", "a blue square"], count=2).png) > 5000


def test_its_weights_come_back_and_draw_the_same_pictures(finished):
    run = finished(EXAMPLE)
    workload = workload_of(run.config)
    bucket = workload.open(run.folder, print)["wide"]
    with np.load(run.folder / runfolder.EXAMPLES) as file:
        kept, tokens = file["wide/pictures"], file["wide/tokens"]
    rows = bucket.splits["test"][: len(kept)]
    assert np.array_equal(bucket.tokens[rows], tokens)
    again = workload.draw(run.load_model(), "wide", torch.from_numpy(tokens), rows)
    torch.testing.assert_close(again, torch.from_numpy(kept), rtol=1e-3, atol=1e-3)


def test_microbatches_of_two_sizes_see_the_same_times(setup):
    """So that arms of a comparison that share pairs out differently train on the same."""
    seen = []
    for size, count in ((4, 2), (8, 1)):
        made = setup(**{"training.batch_size": size})
        of = [batch for batch in made.loader.epoch(0) if batch.dataset == "square"][:count]
        seen.append((torch.cat([batch.draws for batch in of]), torch.cat([batch.tokens for batch in of])))
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(*seen))
