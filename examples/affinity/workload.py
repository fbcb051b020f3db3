"""Protein-protein affinity: pairs of sequences, their pKd, and a search for partners; judged by 1 - Spearman."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from torch import Tensor

from examples.affinity.data import SPLITS, Made, Rule, generate
from examples.affinity.model import PAD, AffinityModel, Encoder, Spec, read_weights, tokens
from examples.affinity.scores import by_composition, draw, recall, scores
from upsnb import config as configs
from upsnb.config import RunConfig
from upsnb.data.batch import Microbatch, TensorBatch
from upsnb.data.datasets import Outline
from upsnb.errors import ConfigError, DataError, Problem
from upsnb.overlays import project_root
from upsnb.runs import runfolder
from upsnb.training import frozen, parallel, setup
from upsnb.training.evaluation import spread
from upsnb.training.losses import Objective
from upsnb.training.workload import Workload
from upsnb.values import NonNegativeFloat

NAME = "binding"  # of the one dataset
CACHE = "affinity-embeddings"
AT_ONCE = 256  # pairs predicted, or proteins encoded, at a time
TEMPERATURE = 0.1  # of cosines in the contrastive loss


class Settings(Made):
    """`data.workload_settings`."""

    contrastive: NonNegativeFloat = 0.1  # weight of the contrastive loss
    binder: float = 7.0  # pKd from which two proteins are partners
    cache: bool = True  # keep the embeddings of a frozen encoder, where reading them is faster


@dataclass
class Pairs(TensorBatch):
    """One microbatch."""

    dataset: str
    chains: Tensor  # (B, 2, T) int64 tokens, or (B, 2, T, D) embeddings
    keep: Tensor  # (B, 2, T) bool, which tokens are there
    partners: Tensor  # (B, 2) int64 numbers of the proteins
    affinity: Tensor  # (B,) float32, measured pKd
    seed: int
    turn: int = 0


@dataclass(frozen=True)
class Proteins:
    """The dataset: proteins, pairs of them by split, and a frozen encoder's embeddings where they are cached."""

    name: str
    spec: Spec
    splits: dict[str, np.ndarray]  # numbers of pairs
    made: Made
    file_name: str
    chains: np.ndarray  # (N, L) residues
    partners: np.ndarray  # (P, 2) numbers of proteins
    measured: np.ndarray  # (P,) pKd
    rule: np.ndarray  # (P,) without noise
    weights: Path | None  # file of the encoder
    cache: Path | None  # and of its embeddings (N, T, D)

    @cached_property
    def tokens(self) -> Tensor:
        return tokens(self.chains)

    @property
    def num_bytes(self) -> int:
        return num_bytes(self.spec, len(self.chains), len(self.partners))

    @property
    def about(self) -> dict:
        return {"files": [self.file_name], "proteins": len(self.chains)}

    @cached_property
    def by_composition(self) -> np.ndarray:
        """pKd of all pairs as a model without a network predicts them, (P,)."""
        counts = np.stack([(self.chains == residue).sum(1) for residue in range(20)], axis=1)
        return by_composition(counts, self.partners, self.measured, self.splits["train"])

    def pairs(self, split: str, calls: int = 1) -> np.ndarray:
        """(P, 2) int64: the pair's number, and 0."""
        return np.stack((self.splits[split], 0 * self.splits[split]), axis=1)

    def given(self, who: np.ndarray | Tensor, device: torch.device | str = "cpu") -> tuple[Tensor, Tensor]:
        """What the model is given of proteins: tokens (..., T), or embeddings of each; and which tokens are there."""
        chains, who = self.tokens[who], np.asarray(who)
        keep = chains != PAD
        if self.cache is not None:
            chains = frozen.Rows(self.cache).read(who.ravel()).unflatten(0, who.shape)
        return chains.to(device), keep.to(device)

    def resident(self, device: torch.device) -> tuple[Tensor, ...]:
        """As `given` of all proteins, and of all pairs the partners and the pKd, on a device."""
        pairs = torch.from_numpy(self.partners).to(device), torch.from_numpy(self.measured).to(device)
        return *self.given(np.arange(len(self.chains)), device), *pairs

    def read(self, microbatch: Microbatch, calls: int = 1, resident: tuple[Tensor, ...] | None = None) -> Pairs:
        numbers = torch.from_numpy(microbatch.pairs[:, 0])
        if resident is None:
            partners, measured = torch.from_numpy(self.partners[numbers]), torch.from_numpy(self.measured[numbers])
            tables = *self.given(partners), partners, measured
        else:
            chains, keep, partners, measured = resident
            numbers = numbers.to(keep.device, non_blocking=True)
            who = partners[numbers]
            tables = chains[who], keep[who], who, measured[numbers]
        return Pairs(self.name, *tables, microbatch.seed, microbatch.turn)


def num_bytes(spec: Spec, proteins: int, pairs: int) -> int:
    """float16 embeddings or int64 tokens, a bool for each; two numbers and a pKd for each pair."""
    return proteins * spec.tokens * ((2 * spec.embedded or 8) + 1) + pairs * 20


def info_nce(vectors_B22S: Tensor, partners: Tensor, binds: Tensor) -> Tensor:
    """Each binder is to be told from the microbatch's other pairs, either way round (arXiv 1807.03748).

    What changes the size of a rank's microbatch changes how hard that is, and so this loss.

    Args:
        vectors_B22S: of both chains, each as first and as second partner.
        partners: (B, 2) numbers of proteins; what shares one with a pair is no counter-example to it.
        binds: (B,) 1 where two are partners; the others are counter-examples only.
    """
    likeness = vectors_B22S[:, 0, 0] @ vectors_B22S[:, 1, 1].T / TEMPERATURE
    own = torch.arange(len(partners), device=partners.device)
    shared = (partners[:, None] == partners).any(-1) & (own[:, None] != own)
    likeness = likeness.masked_fill(shared, -torch.inf)
    losses = sum(F.cross_entropy(table, own, reduction="none") for table in (likeness, likeness.T)) / 2
    return (losses * binds).sum() / binds.sum().clamp_min(1)


class AffinityObjective(Objective):
    """Squared error of pKd in units of the training split, and InfoNCE between partners."""

    TERMS = ("regression", "contrastive")

    def __init__(self, model: AffinityModel, config: RunConfig, settings: Settings):
        super().__init__(model, config.training)
        self.settings = settings

    def weights(self, step: int, microbatch: int) -> dict[str, float]:
        every, weight = self.config.inverse_loss_frequency, self.settings.contrastive
        due = weight > 0 and microbatch % every == 0
        return {"regression": 1.0} | ({"contrastive": weight * every} if due else {})

    def terms(self, batch: Pairs, weights: dict[str, float]) -> dict[str, Tensor]:
        model, spec = self.model, self.model.specs[batch.dataset]
        encoded, terms = model.encode(batch.chains, batch.keep), {}
        if "regression" in weights:
            target = (batch.affinity - spec.mean) / spec.std
            terms["regression"] = (model.bind(encoded, batch.keep) - target).square().mean()
        if "contrastive" in weights:
            vectors, binds = model.vectors(encoded, batch.keep), (batch.affinity >= self.settings.binder).float()
            with torch.autocast(batch.device.type, enabled=False):
                terms["contrastive"] = info_nce(vectors, batch.partners, binds)
        return terms

    def idle(self, batch: Pairs) -> Tensor:
        return self.model(batch.dataset, batch.chains, batch.keep).sum()

    def unreached(self, computed: set[tuple[str, str]]) -> list[torch.nn.Module]:
        if computed and not any(term == "contrastive" for _, term in computed):
            return [self.model.search]
        return super().unreached(computed)


class Affinity(Workload):
    """Proteins that a frozen or trained encoder reads, and a head that tells how well two of them bind."""

    unit, metric = "pairs", "1 - Spearman"

    def __init__(self, config: RunConfig):
        super().__init__(config)
        self.settings = self.section(Settings, "data.workload_settings")
        self.held_out = config.data.split.validation_fraction, config.data.split.test_fraction
        self.model_settings = dict(config.model.settings)
        self.weights = self.model_settings.pop("weights", "")  # file of an encoder, below the project
        self.frozen = bool(self.model_settings.get("frozen"))
        found, made = [], self.settings
        if self.frozen and not self.weights:
            why = "freezes an encoder of random weights"
            found.append(Problem("model.settings.frozen", why, "set weights to its file"))
        if not made.sites * made.width <= made.shortest <= made.longest:
            least = made.sites * made.width
            why = f"is {made.shortest}, and chains have {least} (sites x width) to {made.longest} residues"
            found.append(Problem("data.workload_settings.shortest", why, "set it in between"))
        for name, share, count in zip(SPLITS, (1.0, *self.held_out), made.clusters(self.held_out)):
            if share and not count:
                why = f"{made.num_clusters} clusters leave none for {name}"
                found.append(
                    Problem("data.workload_settings.num_clusters", why, "raise it, or that share of data.split")
                )
        if found:
            raise ConfigError(found, "the workload")

    def _folder(self, root: Path) -> Path:
        return root / self.config.data.root / "generated"

    def _file(self, root: Path) -> Path:
        return self._folder(root) / self.settings.file_name(self.held_out)

    def _weights(self, root: Path) -> Path | None:
        path = root / self.weights if self.weights else None
        if path is not None and not path.is_file():
            raise DataError(f"model.settings.weights: there is no file {path} -> name an encoder's")
        return path

    def _spec(self, mean: float = 0.0, std: float = 1.0, cached: bool = False) -> Spec:
        return Spec(NAME, self.settings.longest + 2, mean, std, self.model_settings.get("width", 64) if cached else 0)

    def _model(self, datasets: Mapping[str, Proteins | Outline]) -> AffinityModel:
        try:
            return AffinityModel({name: dataset.spec for name, dataset in datasets.items()}, **self.model_settings)
        except TypeError as error:
            remedy = "see AffinityModel in examples/affinity/model.py"
            raise ConfigError([Problem("model.settings", str(error), remedy)], "the model") from None

    def _encoder(self, root: Path) -> tuple[Encoder, Path]:
        """The frozen encoder, and where its embeddings are cached: by hash of its weights and of the data."""
        encoder = self._model({NAME: Outline(self._spec(), 0)}).encoder.eval()
        encoder.load_state_dict(read_weights(self._weights(root), encoder))
        key = frozen.key(encoder.state_dict(), self._file(root).name)
        return encoder, frozen.place(self._folder(root), CACHE, key)

    def prepare(self, root: Path, log: Callable[[str], None]) -> None:
        """Generate the data, and keep what a frozen encoder makes of it, unless that is dearer than asking it again."""
        path = self._file(root)
        if not path.is_file():
            path.parent.mkdir(parents=True, exist_ok=True)
            log(f"generating {path.name}")
            generate(self.settings, self.held_out, path)
        if not (self.frozen and self.settings.cache):
            return
        encoder, cache = self._encoder(root)
        with np.load(path) as file:
            given, trained = tokens(file["chains"]), 2 * int((file["split"] == 0).sum())
        device = "cuda" if torch.cuda.is_available() and self.config.training.device != "cpu" else "cpu"
        encoder.to(device)

        @torch.no_grad()
        def compute(numbers: np.ndarray) -> Tensor:
            some = given[torch.from_numpy(numbers)].to(device)
            return encoder(some, some != PAD).half()

        if cache.exists():
            return
        found = frozen.tried(compute, len(given), AT_ONCE, cache.parent, device)
        seen = trained * self.config.stages.operator.epochs / len(given)
        if why := found.against(seen, frozen.free_bytes(cache.parent)):
            log(f"embeddings are not cached: {why}")
        else:
            frozen.build(cache, compute, len(given), AT_ONCE, log)

    def open(self, root: Path, log: Callable[[str], None]) -> dict[str, Proteins]:
        weights = self._weights(root)
        with np.load(self._file(root)) as file:
            chains, partners, split, measured, rule = (
                file[name] for name in ("chains", "pairs", "split", "measured", "rule")
            )
        splits = {name: np.flatnonzero(split == number) for number, name in enumerate(SPLITS)}
        cache = self._encoder(root)[1] if self.frozen and self.settings.cache else None
        cache = cache if cache is not None and cache.exists() else None
        train = measured[splits["train"]]
        spec = self._spec(float(train.mean()), float(train.std()), cache is not None)
        name = self._file(root).name
        return {
            NAME: Proteins(NAME, spec, splits, self.settings, name, chains, partners, measured, rule, weights, cache)
        }

    def outlines(self, root: Path) -> dict[str, Outline]:
        """A cache that is not there yet is not counted on; one of another encoder is taken for its own."""
        cached = self.frozen and self.settings.cache and any(self._folder(root).glob(f"{CACHE}-*.npy"))
        spec, made = self._spec(cached=cached), self.settings
        return {NAME: Outline(spec, num_bytes(spec, made.num_clusters * made.members, made.num_pairs))}

    def spec_from(self, values: dict) -> Spec:
        return Spec(**values)

    def objective(self, datasets: Mapping[str, Proteins | Outline], stage: str, before) -> AffinityObjective:
        model, weights = self._model(datasets), getattr(datasets[NAME], "weights", None)
        if weights is not None:  # a checkpoint brings its own, and memory does not depend on them
            model.encoder.load_state_dict(read_weights(weights, model.encoder))
        return AffinityObjective(model, self.config, self.settings)

    def zeros(self, name: str, spec: Spec, size: int, device=None, calls: int = 1) -> Pairs:
        shape, kind = (size, 2, spec.tokens), (torch.half if spec.embedded else torch.int64)
        chains = torch.zeros((*shape, spec.embedded) if spec.embedded else shape, dtype=kind, device=device)
        keep = torch.ones(shape, dtype=torch.bool, device=device)
        partners = torch.zeros((size, 2), dtype=torch.int64, device=device)
        return Pairs(name, chains, keep, partners, torch.zeros(size, device=device), seed=0)

    @torch.no_grad()
    def evaluate(self, model, datasets, split, ranks, alive, fraction=1.0, examples=None, final=False):
        """Beside the model, what the rule itself reaches on the same noisy measurements: the most that can be."""
        was_training, dataset = model.training, datasets[NAME]
        if not len(dataset.splits[split]):
            return {}
        model.eval()
        numbers = spread(dataset.splits[split], fraction)
        proteins = np.unique(dataset.partners[numbers])
        own = (np.array_split(all_of_them, ranks.world_size)[ranks.rank] for all_of_them in (numbers, proteins))
        found = [call(model, dataset, some, ranks.device, alive) for call, some in zip((predict, search_vectors), own)]
        model.train(was_training)
        predicted, vectors = map(np.concatenate, zip(*parallel.all_gather_objects(ranks, found), strict=True))
        measured, rule, chains = dataset.measured[numbers], dataset.rule[numbers], dataset.chains[proteins]
        partners = np.searchsorted(proteins, dataset.partners[numbers[measured >= self.settings.binder]])
        found = scores(predicted, measured) | recall(vectors[:, 0] @ vectors[:, 1].T, partners)
        best = scores(rule, measured) | recall(Rule(self.settings).affinity(chains, chains), partners)
        counted = dataset.by_composition[numbers]
        if examples is not None and ranks.rank == 0:
            unfinished = examples.with_name(f".{examples.name}")
            with open(unfinished, "wb") as file:
                np.savez(file, predicted=predicted, measured=measured)
            os.replace(unfinished, examples)
        told = {
            "num_samples": len(numbers),
            "error": 1 - found["spearman"],
            "baseline": "composition",
            "baseline_error": 1 - scores(counted, measured)["spearman"],
            "share_of_rule": found["spearman"] / best["spearman"],
            **found,
            **{f"rule_{name}": value for name, value in best.items()},
            "candidates": len(proteins),
            "per_sample": {"samples": numbers.tolist(), "error": np.abs(predicted - measured).tolist()},  # [pKd]
        }
        return {NAME: told}

    def figures(self, drawn) -> dict[str, Callable[[], Figure]]:
        def affinity() -> Figure:
            with np.load(drawn.folder / runfolder.EXAMPLES) as file:
                return draw(drawn.results[NAME], file["predicted"], file["measured"])

        return {"affinity": affinity} if drawn.results else {}


def _joined(call: Callable[[Tensor], Tensor], numbers: np.ndarray, alive: Callable[[], None]) -> np.ndarray:
    """What a call gives for numbers, AT_ONCE of them at a time; where there are none, nothing of the right shape."""
    found = []
    for start in range(0, max(len(numbers), 1), AT_ONCE):
        alive()
        found.append(call(torch.from_numpy(numbers[start : start + AT_ONCE])).float().cpu().numpy())
    return np.concatenate(found)


@torch.no_grad()
def predict(model, dataset: Proteins, numbers: np.ndarray, device="cpu", alive=lambda: None) -> np.ndarray:
    """pKd of pairs by their numbers, (P,) float32."""
    return _joined(lambda some: model(NAME, *dataset.given(dataset.partners[some], device)), numbers, alive)


@torch.no_grad()
def search_vectors(model, dataset: Proteins, proteins: np.ndarray, device="cpu", alive=lambda: None) -> np.ndarray:
    """Of proteins by their numbers, each as first and as second partner, (N, 2, S) float32."""

    def vectors(some: Tensor) -> Tensor:
        chains, keep = dataset.given(some, device)
        return model.vectors(model.encode(chains, keep), keep)

    return _joined(vectors, proteins, alive)


def ensemble(folders: Iterable[Path | str], split: str = "test") -> dict[str, dict[str, float]]:
    """Scores on a split of each run, and of the mean of what they predict.

    Raises:
        DataError: the runs were not made for one data set.
    """
    found, made = {}, set()
    for folder in map(Path, folders):
        workload = Affinity(configs.load(folder / runfolder.CONFIG))
        (dataset,) = workload.open(project_root(), lambda message: None).values()
        made.add(dataset.file_name)
        found[folder.name] = predict(setup.load_model(folder), dataset, dataset.splits[split])
    if len(made) != 1:
        raise DataError(f"{', '.join(found)}: made for {len(made)} data sets -> choose runs of one")
    found["mean"] = np.mean(list(found.values()), axis=0)
    return {name: scores(predicted, dataset.measured[dataset.splits[split]]) for name, predicted in found.items()}
