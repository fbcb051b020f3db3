"""Protein affinity: a rule that is what it says, an encoder that is ESM-2, scores by the book, runs like any other."""

import argparse
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.stats import rankdata
from small_examples import SMALL

from examples.affinity import data, scores, workload
from examples.affinity.data import CHARGE, HYDROPHOBICITY, NONE, RESIDUES, Made, Rule
from examples.affinity.model import PAD, AffinityModel, Encoder, Sizes, read_weights, tokens
from examples.affinity.workload import Affinity, ensemble, info_nce, predict
from upsnb import overlays
from upsnb.errors import ConfigError, DataError
from upsnb.memory import measure
from upsnb.memory.predict import predict as predict_memory
from upsnb.report import results
from upsnb.runs import handle, runfolder
from upsnb.training import frozen, parallel
from upsnb.training.frozen import Costs
from upsnb.training.parallel import Ranks
from upsnb.training.setup import Setup

EXAMPLE = "affinity"
MADE = SMALL[EXAMPLE]["workload_settings"]
HELD_OUT = (0.2, 0.2)


@pytest.fixture(scope="module")
def made() -> Made:
    return Made(**MADE)


@pytest.fixture(scope="module")
def arrays(made, tmp_path_factory) -> dict[str, np.ndarray]:
    path = tmp_path_factory.mktemp("made") / made.file_name(HELD_OUT)
    data.generate(made, HELD_OUT, path)
    assert list(path.parent.iterdir()) == [path], "nothing unfinished is left"
    with np.load(path) as file:
        return {name: file[name] for name in file.files}


def written(chain: np.ndarray) -> str:
    return "".join(RESIDUES[residue] for residue in chain if residue != NONE)


# -- the rule ------------------------------------------------------------------------------------------------------


def by_hand(rule: Rule, first: str, second: str) -> tuple[float, float]:
    """Energy of motifs and of single residues, residue by residue, unscaled."""
    motifs = ["".join(RESIDUES[residue] for residue in motif) for motif in rule.motifs]
    centre = sum(HYDROPHOBICITY.values()) / 20 / 4.5

    def worth(text: str, place: int, motif: str) -> float:
        window = text[place : place + len(motif)]
        same = sum(ours == theirs for ours, theirs in zip(window, motif))
        return {len(motif): 1.0, len(motif) - 1: 1 / 3}.get(same, 0.0) if len(window) == len(motif) else 0.0

    couplings = rule.parts[0][: len(motifs), : len(motifs)]
    motif_energy = contact_energy = 0.0
    for i in range(len(first)):
        for j in range(len(second)):
            near = math.exp(-abs(i - j) / rule.made.decay)
            for m, ours in enumerate(motifs):
                for n, theirs in enumerate(motifs):
                    motif_energy += worth(first, i, ours) * couplings[m, n] * worth(second, j, theirs) * near
            water = [HYDROPHOBICITY[letter] / 4.5 - centre for letter in (first[i], second[j])]
            charge = [CHARGE.get(letter, 0.0) for letter in (first[i], second[j])]
            contact_energy += (water[0] * water[1] - charge[0] * charge[1]) * near
    return motif_energy, contact_energy * rule.parts[1][-2, -2]


def test_the_rule_is_the_sum_over_residues_that_it_says(made, arrays):
    rule = Rule(made)
    chains = arrays["chains"][:4]
    found = rule.affinity(chains, chains)
    for i in range(4):
        for j in range(4):
            assert found[i, j] == pytest.approx(
                sum(by_hand(rule, written(chains[i]), written(chains[j]))) + rule.offset, rel=1e-9
            )
    np.testing.assert_allclose(found, found.T)


def test_a_motif_cut_off_by_the_end_of_a_chain_is_none(made):
    rule = Rule(made)
    whole = np.array([[*rule.motifs[0], NONE, NONE], [0, 0, *rule.motifs[0]], [0, 0, 0, *rule.motifs[0][:2]]], np.uint8)
    strength = rule.features(whole)[..., 0]
    assert strength[0, 0] == 1 and strength[1, 2] == 1 and strength[2, 3:].max() == 0


def test_affinities_spread_and_err_as_much_as_was_asked_for():
    made = Made(num_clusters=250, motif_share=0.7, spread=1.5, mean=5.0)
    rule = Rule(made)
    chains = data.make_chains(made, rule.motifs, 250, np.random.default_rng(9))
    first, second = chains[:500], chains[500:]
    whole = rule.affinity(first, second)
    assert (whole.mean(), whole.std()) == (pytest.approx(5.0, abs=0.15), pytest.approx(1.5, rel=0.1))
    motifs = rule.affinity(first, second, rule.parts[0])
    assert motifs.var() / whole.var() == pytest.approx(0.7, abs=0.1)


def test_the_best_reachable_score_is_that_of_the_rule_under_noise_of_known_size(made, arrays):
    noise = arrays["measured"] - arrays["rule"]
    assert noise.std() == pytest.approx(made.noise, rel=0.1) and abs(noise.mean()) < 0.1
    assert abs(np.corrcoef(noise, arrays["rule"])[0, 1]) < 0.15
    pairs, chains = arrays["pairs"], arrays["chains"]
    np.testing.assert_allclose(arrays["rule"], Rule(made).affinity(chains, chains)[tuple(pairs.T)], rtol=1e-4)
    binders = (arrays["rule"] >= 7).mean()
    assert 0.2 < binders < 0.7, "partners are there, and others to tell them from"


def alike(first: np.ndarray, second: np.ndarray) -> float:
    """Largest share of the shorter chain's residues that agree, at any offset."""
    first, second = first[first != NONE], second[second != NONE]
    best = 0
    for shift in range(-len(second) + 1, len(first)):
        ours, theirs = first[max(shift, 0) :], second[max(-shift, 0) :]
        count = min(len(ours), len(theirs))
        best = max(best, int((ours[:count] == theirs[:count]).sum()))
    return best / min(len(first), len(second))


def test_no_protein_is_like_one_of_another_split(arrays):
    chains, cluster, split = arrays["chains"], arrays["cluster"], arrays["split"]
    of = {number: set(arrays["pairs"][split == number].ravel()) for number in range(3)}
    assert not of[0] & of[1] and not of[0] & of[2] and not of[1] & of[2]
    clusters = {number: set(cluster[sorted(who)]) for number, who in of.items()}
    assert not clusters[0] & clusters[1] and not clusters[0] & clusters[2] and not clusters[1] & clusters[2]
    inside = [alike(chains[n], chains[n + 1]) for n in range(0, len(chains), 4)]
    across = [alike(chains[i], chains[j]) for i in sorted(of[2])[::3] for j in sorted(of[0])[::7]]
    assert np.median(inside) > 0.4 and np.quantile(across, 0.99) < 0.5 and np.median(across) < 0.3


def test_a_file_is_named_by_all_that_it_depends_on_and_made_again_alike(made, arrays, tmp_path):
    others = ({}, {"seed": 1}, {"noise": 0.5}, {"decay": 6.0})
    names = {Made(**{**MADE, **other}).file_name(HELD_OUT) for other in others}
    assert len(names | {made.file_name((0.1, 0.2))}) == 5
    data.generate(made, HELD_OUT, tmp_path / "again.npz")
    with np.load(tmp_path / "again.npz") as file:
        assert all(np.array_equal(file[name], values) for name, values in arrays.items())
    assert len(np.unique(arrays["pairs"], axis=0)) == len(arrays["pairs"])


# -- the encoder ---------------------------------------------------------------------------------------------------

TRANSFORMERS = {  # names of the transformers library beside fair-esm's
    "embed_tokens": "embeddings.word_embeddings",
    "layers": "encoder.layer",
    "self_attn.q_proj": "attention.self.query",
    "self_attn.k_proj": "attention.self.key",
    "self_attn.v_proj": "attention.self.value",
    "self_attn.out_proj": "attention.output.dense",
    "self_attn_layer_norm": "attention.LayerNorm",
    "fc1": "intermediate.dense",
    "fc2": "output.dense",
    "final_layer_norm": "LayerNorm",
    "emb_layer_norm_after": "encoder.emb_layer_norm_after",
}
GIVEN = torch.tensor([[0, 4, 9, 14, 23, 5, 2, 1, 1], [0, 7, 7, 20, 11, 12, 13, 19, 2]])
SAID = {  # what transformers 4.57 makes of them: EsmModel with token dropout, rotary positions, norms of 1e-5
    (0, 1): [-0.7417, 0.2066, 0.2886, -0.6126, 0.52, -1.2187, 1.3702, -1.476],
    (0, 6): [-0.841, 0.1676, 0.2595, -0.5844, 0.5323, -1.1434, 1.3852, -1.4837],
    (1, 5): [-0.6349, 0.0345, 0.2842, -0.7225, 0.5393, -1.2188, 1.5008, -1.1962],
}


def by_formula(encoder: Encoder) -> dict[str, torch.Tensor]:
    """Weights that anyone can make again, by their names in the transformers library."""
    found = {}
    for name, value in encoder.state_dict().items():
        for ours, theirs in TRANSFORMERS.items():
            name = name.replace(f"{ours}.", f"{theirs}.") if f".{ours}." in f".{name}" else name
        wave = (torch.arange(value.numel(), dtype=torch.float64) * 0.7 + sum(name.encode())).sin() * 0.5
        found[name] = wave.float().view_as(value) + (1.0 if "orm" in name and name.endswith("weight") else 0.0)
    return found


@pytest.fixture
def encoder() -> Encoder:
    return Encoder(8, 2, 2, GIVEN.shape[1]).eval()


def test_it_is_esm2_to_the_last_digit(encoder, tmp_path):
    torch.save(by_formula(encoder), tmp_path / "pytorch_model.bin")
    encoder.load_state_dict(read_weights(tmp_path / "pytorch_model.bin", encoder))
    with torch.no_grad():
        found = encoder(GIVEN, GIVEN != PAD)
    for (chain, place), values in SAID.items():
        torch.testing.assert_close(found[chain, place], torch.tensor(values), atol=1e-4, rtol=0)


@pytest.mark.parametrize("prefix", ["", "esm.", "encoder.sentence_encoder.", "encoder."])
def test_weights_are_found_under_every_name_of_the_family(encoder, tmp_path, prefix):
    own = {name: value.clone() for name, value in encoder.state_dict().items()}
    found = by_formula(encoder) if prefix == "esm." else own
    expected = read_weights(_saved(tmp_path / "bare.pt", found), encoder)
    saved = {f"{prefix}{name}": value.half() for name, value in found.items()} | {"lm_head.bias": torch.ones(33)}
    args = {"args": argparse.Namespace(arch="esm2")} if prefix.startswith("encoder") else {}
    path = _saved(tmp_path / "model.pt", {**args, "model": saved} if args else saved)
    for name, value in read_weights(path, encoder).items():
        torch.testing.assert_close(value, expected[name].half().float(), msg=name)


def _saved(path: Path, values: dict) -> Path:
    torch.save(values, path)
    return path


@pytest.mark.parametrize("sizes", [(8, 1, 2), (8, 3, 2), (16, 2, 2)])
def test_weights_of_another_size_are_refused_by_name(encoder, tmp_path, sizes):
    path = _saved(tmp_path / "model.pt", encoder.state_dict())
    with pytest.raises(DataError, match=r"model.pt: (layers\.|embed).* -> set model.settings to the file's sizes"):
        read_weights(path, Encoder(*sizes, 9))


@pytest.fixture
def model(perturb) -> AffinityModel:
    spec = workload.Spec("binding", 20, 6.0, 1.5)
    return perturb(AffinityModel({"binding": spec}, Sizes(width=16, head_width=16, head_layers=2))).eval()


def test_what_stands_beside_a_chain_or_behind_its_end_changes_nothing(model, arrays):
    given = tokens(arrays["chains"])[arrays["pairs"][:6]]
    keep = given != PAD
    alone = torch.cat([model("binding", given[n : n + 1], keep[n : n + 1]) for n in range(6)])
    behind = torch.where(keep, given, 7)
    torch.testing.assert_close(model("binding", behind, keep), alone, rtol=1e-4, atol=1e-4)
    assert alone.std() > 1e-3
    torch.testing.assert_close(model("binding", given.flip(1), keep.flip(1)), alone, rtol=1e-4, atol=1e-4)
    vectors = model.vectors(model.encode(given, keep), keep)
    torch.testing.assert_close(vectors.norm(dim=-1), torch.ones(6, 2, 2))
    torch.testing.assert_close(model.vectors(model.encode(behind, keep), keep), vectors, rtol=1e-4, atol=1e-4)


# -- losses --------------------------------------------------------------------------------------------------------


def test_info_nce_is_the_mean_surprise_of_partners_among_the_others():
    draws = np.random.default_rng(4)
    vectors = draws.normal(size=(7, 2, 2, 5))
    vectors /= np.linalg.norm(vectors, axis=-1, keepdims=True)
    partners = np.array([[0, 1], [2, 3], [0, 4], [5, 3], [6, 7], [8, 9], [10, 1]])
    binds = np.array([1, 0, 1, 1, 0, 1, 1])
    expected = []
    for i in np.flatnonzero(binds):
        for way in (0, 1):
            others = [j for j in range(7) if j == i or not set(partners[i]) & set(partners[j])]
            if way == 0:
                cosines = [vectors[i, 0, 0] @ vectors[j, 1, 1] for j in others]
            else:
                cosines = [vectors[j, 0, 0] @ vectors[i, 1, 1] for j in others]
            weights = [math.exp(cosine / workload.TEMPERATURE) for cosine in cosines]
            expected.append(-math.log(weights[others.index(i)] / sum(weights)))
    found = info_nce(torch.from_numpy(vectors), torch.from_numpy(partners), torch.from_numpy(binds).double())
    assert found.item() == pytest.approx(np.mean(expected), rel=1e-9)
    nobody = info_nce(torch.from_numpy(vectors), torch.from_numpy(partners), torch.zeros(7).double())
    assert nobody.item() == 0


@pytest.mark.parametrize("term", ["regression", "contrastive"])
def test_each_term_reaches_what_it_is_for(setup, term):
    made = setup()
    (batch,) = made.loader.peek()
    total, _ = made.objective(batch, {term: 1.0}, None)
    total.backward()
    reached = {name.split(".")[0] for name, p in made.model.named_parameters() if p.grad is not None and p.grad.any()}
    assert reached == {"encoder", *({"search"} if term == "contrastive" else {"input", "facing", "energy"})}


def test_the_contrastive_loss_can_be_rarer_and_keeps_its_mean(setup):
    made = setup(**{"training.inverse_loss_frequency": 4, "data.workload_settings.contrastive": 0.2})
    weights = [made.objective.weights(0, number) for number in range(8)]
    assert np.mean([w.get("contrastive", 0.0) for w in weights]) == pytest.approx(0.2)
    assert ["contrastive" in w for w in weights] == [True, False, False, False] * 2
    assert made.objective.unreached({("binding", "regression")}) == [made.model.search]
    assert made.objective.unreached({("binding", "regression"), ("binding", "contrastive")}) == []
    none = setup(**{"data.workload_settings.contrastive": 0})
    assert none.objective.weights(0, 0) == {"regression": 1.0}


@pytest.mark.parametrize("kernel", ["flash", "flex"])
def test_a_kernel_without_a_mask_is_refused(setup, kernel):
    with pytest.raises(ConfigError, match=rf"{kernel} takes no mask .* set it to sdpa, efficient or math"):
        setup(**{"operator.pdet.attention": kernel, "training.on_missing": "skip"})


# -- scores --------------------------------------------------------------------------------------------------------


def test_correlations_are_those_of_the_book():
    draws = np.random.default_rng(2)
    truth = draws.normal(size=40).round(1)
    guess = (truth + draws.normal(size=40)).round(1)

    def correlation(x, y) -> float:
        x_mean, y_mean = sum(x) / len(x), sum(y) / len(y)
        both = sum((a - x_mean) * (b - y_mean) for a, b in zip(x, y))
        return both / math.sqrt(sum((a - x_mean) ** 2 for a in x) * sum((b - y_mean) ** 2 for b in y))

    def ranks(values) -> list[float]:
        return [
            sum(other < value for other in values) + (sum(other == value for other in values) + 1) / 2
            for value in values
        ]

    found = scores.scores(guess, truth)
    assert len(set(guess)) < 40 and ranks(guess) == pytest.approx(rankdata(guess)), "there are ties"
    assert found["spearman"] == pytest.approx(correlation(ranks(guess), ranks(truth)))
    assert found["pearson"] == pytest.approx(correlation(guess, truth))
    assert found["rmse"] == pytest.approx(math.sqrt(sum((a - b) ** 2 for a, b in zip(guess, truth)) / 40))


def test_recall_counts_partners_among_the_first_and_not_their_rivals():
    draws = np.random.default_rng(3)
    likeness = draws.integers(0, 12, size=(9, 15)).astype(float)
    partners = np.unique(draws.integers(0, (9, 15), size=(25, 2)), axis=0)
    known = {tuple(pair) for pair in partners.tolist()}
    hits = dict.fromkeys(scores.TOP, 0)
    for row, column in partners.tolist():
        candidates = [c for c in range(15) if (row, c) not in known]
        before = sum(likeness[row, c] >= likeness[row, column] for c in candidates)
        for k in hits:
            hits[k] += before + 1 <= k
    found = scores.recall(likeness, partners)
    assert found == {f"recall_at_{k}": pytest.approx(count / len(partners)) for k, count in hits.items()}
    assert 0 < found["recall_at_1"] < found["recall_at_5"] < found["recall_at_10"] <= 1
    assert all(math.isnan(value) for value in scores.recall(likeness, partners[:0]).values())


def test_a_single_pair_has_an_error_and_no_correlation():
    found = scores.scores(np.array([5.0]), np.array([7.0]))
    assert found.pop("rmse") == 2 and all(map(math.isnan, found.values()))


def test_the_baseline_knows_composition_and_nothing_that_it_was_not_shown():
    draws = np.random.default_rng(5)
    counts, partners = draws.integers(0, 6, size=(120, 20)), draws.integers(0, 120, size=(1500, 2))
    law = draws.normal(size=(20, 20)) / 20
    measured = np.einsum("pi,ij,pj->p", counts[partners[:, 0]], law, counts[partners[:, 1]])
    train = np.arange(1200)
    found = scores.by_composition(counts, partners, measured, train)
    assert np.corrcoef(found[1200:], measured[1200:])[0, 1] > 0.9
    other = np.where(np.arange(1500) < 1200, measured, 0.0)
    np.testing.assert_array_equal(scores.by_composition(counts, partners, other, train), found)


def test_ranks_that_share_an_evaluation_find_what_one_finds(setup, monkeypatch):
    made, judge = setup(), Affinity
    whole = judge(made.config).evaluate(made.model, made.datasets, "test", Ranks(), lambda: None)
    own = {0: [], 1: []}
    for rank in (0, 1):
        monkeypatch.setattr(
            parallel, "all_gather_objects", lambda ranks, value: own[ranks.rank].append(value) or [value, value]
        )
        judge(made.config).evaluate(made.model, made.datasets, "test", Ranks(rank, 2), lambda: None)
    gathered = map(list, zip(*own.values()))
    monkeypatch.setattr(parallel, "all_gather_objects", lambda ranks, value: next(gathered))
    shared = judge(made.config).evaluate(made.model, made.datasets, "test", Ranks(1, 2), lambda: None)
    for key, value in whole["binding"].items():
        if key == "per_sample":
            assert value["samples"] == shared["binding"][key]["samples"]
            np.testing.assert_allclose(value["error"], shared["binding"][key]["error"], rtol=1e-4, atol=1e-5)
        else:
            assert shared["binding"][key] == (value if isinstance(value, str) else pytest.approx(value, rel=1e-4))


def test_quick_validation_measures_a_share_and_the_full_test_all(setup):
    made = setup()
    judge, split = Affinity(made.config), made.datasets["binding"].splits["validation"]
    quick, again, full = (
        judge.evaluate(made.model, made.datasets, "validation", Ranks(), lambda: None, fraction)["binding"]
        for fraction in (0.25, 0.25, 1.0)
    )
    assert quick == again and quick["num_samples"] == round(0.25 * len(split)) and full["num_samples"] == len(split)
    assert set(quick["per_sample"]["samples"]) < set(full["per_sample"]["samples"]) == set(split.tolist())
    of = dict(zip(full["per_sample"]["samples"], full["per_sample"]["error"]))
    expected = [of[sample] for sample in quick["per_sample"]["samples"]]
    np.testing.assert_allclose(quick["per_sample"]["error"], expected, rtol=1e-4, atol=1e-5)
    assert made.model.training
    assert len(predict(made.model, made.datasets["binding"], split[:0])) == 0


# -- a frozen encoder ----------------------------------------------------------------------------------------------


@pytest.fixture
def frozen_setup(setup, tmp_path):
    """`frozen_setup(seed=1)`: a setup around a frozen encoder of random weights, which lie in a file."""

    def make(seed: int = 1, said: list | None = None, **overlay) -> Setup:
        torch.manual_seed(seed)
        path = _saved(tmp_path / f"encoder{seed}.pt", Encoder(16, 2, 4, 20).state_dict())
        overlay = {"model.settings.frozen": True, "model.settings.weights": str(path), **overlay}
        return setup(**overlay)

    return make


def pays(monkeypatch, **costs) -> None:
    """As if a row had cost so much."""
    known = {"compute_s": 1.0, "read_s": 0.001, "nbytes": 1000, **costs}
    monkeypatch.setattr(frozen, "tried", lambda *arguments: Costs(**known))


def test_embeddings_from_the_cache_are_what_the_encoder_says(frozen_setup, monkeypatch, shared):
    pays(monkeypatch)
    cached, plain = frozen_setup(), frozen_setup(**{"data.workload_settings.cache": False})
    dataset, uncached = cached.datasets["binding"], plain.datasets["binding"]
    assert dataset.cache and not uncached.cache and dataset.about == uncached.about, "both are judged by the same data"
    assert dataset.spec.embedded == 16 and dataset.num_bytes > uncached.num_bytes
    numbers = dataset.splits["test"]
    np.testing.assert_allclose(
        predict(cached.model.eval(), dataset, numbers), predict(plain.model.eval(), uncached, numbers), atol=2e-2
    )
    for each in (cached, plain):
        each.model.train()
        (batch,) = each.loader.peek()
        total, _ = each.objective(batch, each.objective.weights(0, 0), None)
        total.backward()
    ours, theirs = (torch.cat([p.grad.flatten() for p in s.model.facing.parameters()]) for s in (cached, plain))
    torch.testing.assert_close(ours, theirs, rtol=0.05, atol=2e-3)
    resident, given = dataset.resident("cpu"), next(iter(cached.loader.schedule.epoch(0)))
    for name, value in dataset.read(given).tensors().items():
        assert torch.equal(value, dataset.read(given, resident=resident).tensors()[name]), name


def test_a_cache_is_of_its_weights_and_its_data(frozen_setup, monkeypatch):
    pays(monkeypatch)
    first = frozen_setup(1).datasets["binding"].cache
    before = first.read_bytes()
    again = frozen_setup(1).datasets["binding"].cache
    assert again == first and first.read_bytes() == before
    other = frozen_setup(2).datasets["binding"].cache
    assert other != first and other.read_bytes() != before
    assert first.read_bytes() == before, "a run of the other encoder may be reading it"
    reseeded = frozen_setup(2, **{"data.workload_settings.seed": 5}).datasets["binding"].cache
    assert reseeded not in (first, other)


@pytest.mark.parametrize(
    ("costs", "why"),
    [
        ({"read_s": 2.0}, "reading a row takes 2e+03 ms and computing it 1e+03 ms"),
        ({"nbytes": 2**60}, "GiB left"),
    ],
)
def test_a_cache_that_costs_more_than_asking_again_is_refused_with_the_reason(
    config, frozen_setup, monkeypatch, costs, why
):
    pays(monkeypatch, **costs)
    made, said = frozen_setup(3), []
    assert made.datasets["binding"].cache is None and made.datasets["binding"].spec.embedded == 0
    Affinity(made.config).prepare(Path(), said.append)
    assert said and said[0].startswith("embeddings are not cached: ") and why in said[0]


def test_a_frozen_encoder_stays_and_has_no_gradient(frozen_setup):
    made = frozen_setup(4, **{"training.ema_decay": 0.9})
    before = {name: value.clone() for name, value in made.model.state_dict().items()}
    made.set_learning_rate(0.5)
    for step in range(3):
        made.step(made.loader.peek(), step)
    moved = {name for name, value in made.model.state_dict().items() if not torch.equal(value, before[name])}
    assert moved and not [name for name in moved if name.startswith("encoder.")]
    assert made.model.blocks() == list(made.model.facing)
    given = torch.load(made.datasets["binding"].weights)
    assert all(torch.equal(value, before[f"encoder.{name}"]) for name, value in given.items())


def test_freezing_random_weights_or_naming_none_that_are_there_is_refused(setup, tmp_path):
    with pytest.raises(ConfigError, match="model.settings.frozen: freezes an encoder of random weights -> set weights"):
        setup(**{"model.settings.frozen": True})
    with pytest.raises(DataError, match="there is no file .*none.pt -> name an encoder's"):
        setup(**{"model.settings.weights": str(tmp_path / "none.pt")})
    with pytest.raises(DataError, match="there is no file .*none.pt -> name an encoder's"):
        setup(**{"model.settings.weights": str(tmp_path / "none.pt"), "model.settings.frozen": True})
    with pytest.raises(ConfigError, match=r"shortest: is 5, and chains have 6 \(sites x width\) to 18 residues"):
        setup(**{"data.workload_settings.shortest": 5})
    with pytest.raises(
        ConfigError, match="data.workload_settings.motif: Extra inputs .* the settings are num_clusters"
    ):
        setup(**{"data.workload_settings.motif": 3})
    with pytest.raises(ConfigError, match="data.workload_settings.noise: Input should be greater"):
        setup(**{"data.workload_settings.noise": -0.1})
    with pytest.raises(ConfigError, match="num_clusters: 2 clusters leave none for validation"):
        setup(**{"data.workload_settings.num_clusters": 2})
    with pytest.raises(ConfigError, match="num_heads: 16 over 3 heads .*\n.*head_heads: 16 over 16 heads"):
        setup(**{"model.settings.num_heads": 3, "model.settings.head_heads": 16})
    with pytest.raises(ConfigError, match="model.settings.depth: Extra inputs .* the settings are width, num_layers"):
        setup(**{"model.settings.depth": 3})


# -- runs ----------------------------------------------------------------------------------------------------------


def test_a_run_is_judged_by_spearman_beside_what_the_rule_reaches(finished):
    report = results.run_numbers(finished(EXAMPLE))
    found = report["datasets"]["binding"]["test"]
    assert found["error"] == pytest.approx(1 - found["spearman"]) and 0.7 < found["rule_spearman"] <= 1
    assert found["share_of_rule"] == pytest.approx(found["spearman"] / found["rule_spearman"])
    assert results.gains(report)["binding"] == pytest.approx(found["baseline_error"] / found["error"])


def test_what_a_run_has_reported_its_model_reaches_again(finished):
    run = finished(EXAMPLE)
    dataset = Affinity(run.config).open(Path(), lambda message: None)["binding"]
    numbers = dataset.splits["test"]
    again = scores.scores(predict(run.load_model(), dataset, numbers), dataset.measured[numbers])
    found = results.run_numbers(run)["datasets"]["binding"]["test"]
    assert {key: found[key] for key in again} == pytest.approx(again, rel=1e-5)


def test_an_ensemble_predicts_the_mean_of_its_runs(finished, config, train_here, tmp_path):
    run = finished(EXAMPLE)
    namesake, other = tmp_path / run.folder.name, tmp_path / "other"  # a second run may have the first one's name
    train_here(config(**{"training.seed": 7}), namesake)
    found = ensemble([run.folder, namesake])
    dataset = Affinity(run.config).open(Path(), lambda message: None)["binding"]
    numbers = dataset.splits["test"]
    each = [predict(handle.Run(folder).load_model(), dataset, numbers) for folder in (run.folder, namesake)]
    expected = [scores.scores(predicted, dataset.measured[numbers]) for predicted in (*each, (each[0] + each[1]) / 2)]
    assert list(found) == [EXAMPLE, str(namesake), "mean"]
    assert list(found.values()) == [pytest.approx(one) for one in expected]
    assert not np.allclose(*each)
    train_here(config(**{"data.workload_settings.seed": 9}), other)
    with pytest.raises(DataError, match=f"{EXAMPLE}, other: made for 2 data sets -> choose runs of one"):
        ensemble([run.folder, other])


@pytest.mark.parametrize("cache", [True, False])
def test_memory_of_a_frozen_encoder_is_that_of_its_head(frozen_setup, monkeypatch, cache):
    pays(monkeypatch)
    made = frozen_setup(6, **{"data.workload_settings.cache": cache, "training.batch_size": 64})
    assert made.datasets["binding"].spec.embedded == 16 * cache
    predicted, measured = predict_memory(made.config, Path()), measure.measure(made.config, Path())
    assert predicted.nbytes == pytest.approx(measured.nbytes, rel=0.05)
    trained = made.config.model_copy(update={"model": made.config.model.model_copy(update={"settings": {"width": 16}})})
    assert predicted.nbytes < 0.7 * predict_memory(trained, Path()).nbytes


def curve(folder: Path, term: str) -> list[float]:
    return [e["losses"][term] for e in runfolder.read_events(folder, ("step",)) if term in e["losses"]]


@pytest.mark.long
def test_sharded_ranks_train_what_replicated_ones_train(config, tmp_path):
    for name, sharded in (("replicated", False), ("sharded", True)):
        overlay = {"training.num_gpus": 2, "training.batch_size": 8, "training.inverse_loss_frequency": 2}
        overlay |= {"optimizer.name": "adamw", "training.ema_decay": 0.9, "training.use_fsdp2": sharded}
        handle.start(config(**overlay), folder=tmp_path / name).wait()
    for term in ("regression", "contrastive"):
        replicated, sharded = (curve(tmp_path / name, term) for name in ("replicated", "sharded"))
        assert len(replicated) > 10 / (1 + (term == "contrastive"))
        np.testing.assert_allclose(sharded, replicated, rtol=1e-3)


@pytest.mark.long
def test_it_learns_the_hidden_rule(config, train_here, tmp_path):
    """A twentieth of the training of params/cpu.yaml, on shorter chains."""
    rule = {
        "num_clusters": 400,
        "num_pairs": 8000,
        "shortest": 16,
        "longest": 24,
        "sites": 2,
        "num_motifs": 4,
        "tried": 8,
    }
    overlay = {"data.workload_settings": rule, "training.batch_size": 64, "stages.operator.epochs": 7}
    overlay |= {"data.split.validation_fraction": 0.1, "data.split.test_fraction": 0.1}
    sizes = {"model.settings": {"width": 32, "head_width": 32}}
    train_here(overlays.apply(config(), {**overlay, **sizes}), tmp_path / "run")
    found = results.run_numbers(handle.Run(tmp_path / "run"))["datasets"]["binding"]["test"]
    assert found["share_of_rule"] > 0.8 and found["error"] < found["baseline_error"]
    assert found["recall_at_10"] > 2 * 10 / found["candidates"]
