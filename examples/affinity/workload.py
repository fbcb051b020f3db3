"""Protein-protein affinity: pairs of sequences, their pKd, and a search for partners; judged by 1 - Spearman."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from torch import Tensor

from examples.affinity.data import Made, Rule, generate
from examples.affinity.model import PAD, AffinityModel, Encoder, Sizes, Spec, read_weights, tokens
from examples.affinity.scores import by_composition, draw, recall, scores
from upsnb.config import TrainingConfig
from upsnb.data.batch import Microbatch, TensorBatch
from upsnb.data.datasets import Outline
from upsnb.errors import DataError, Problem
from upsnb.overlays import project_root
from upsnb.runs import runfolder
from upsnb.runs.handle import Run
from upsnb.training import frozen
from upsnb.training.parallel import Ranks
from upsnb.training.tables import SPLITS, PlainObjective, Table, TableWorkload, shared_out
from upsnb.values import NonNegativeFloat

NAME = "binding"  # of the one dataset
CACHE = "affinity-embeddings"
AT_ONCE = 256  # pairs predicted, or proteins encoded, at a time
TEMPERATURE = 0.1  # of cosines in the contrastive loss
ALONE = Ranks()


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
class Proteins(Table):
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
    def tables(self) -> tuple[Tensor, ...]:
        """Tokens or embeddings of all proteins, and which are there; of all pairs the partners and the pKd.

        Embeddings stay on the disk until one is asked for; they are opened anew, because a memory map is pickled whole.
        """
        chains = self.tokens if self.cache is None else torch.from_numpy(np.load(self.cache, mmap_mode="c"))
        return chains, self.tokens != PAD, torch.from_numpy(self.partners), torch.from_numpy(self.measured)

    @property
    def about(self) -> dict:
        return {"files": [self.file_name], "proteins": len(self.chains)}

    @cached_property
    def by_composition(self) -> np.ndarray:
        """pKd of all pairs as a model without a network predicts them, (P,)."""
        counts = np.stack([(self.chains == residue).sum(1) for residue in range(20)], axis=1)
        return by_composition(counts, self.partners, self.measured, self.splits["train"])

    def given(self, who: np.ndarray, device: torch.device | str = "cpu") -> tuple[Tensor, Tensor]:
        """What the model is given of proteins: tokens (..., T), or embeddings of each; and which tokens are there."""
        chains, keep, *_ = self.tables
        return chains[who].to(device), keep[who].to(device)

    def batch(self, tables: tuple[Tensor, ...], samples: Tensor, microbatch: Microbatch) -> Pairs:
        chains, keep, partners, measured = tables
        who = partners[samples]
        return Pairs(self.name, chains[who], keep[who], who, measured[samples], microbatch.seed, microbatch.turn)


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


class AffinityObjective(PlainObjective):
    """Squared error of pKd in units of the training split, and InfoNCE between partners."""

    TERMS = ("regression", "contrastive")
    GRAPHS = ("losses",)

    def __init__(self, model: AffinityModel, config: TrainingConfig, settings: Settings):
        super().__init__(model, config)
        self.settings = settings

    def weights(self, step: int, microbatch: int) -> dict[str, float]:
        every, weight = self.config.inverse_loss_frequency, self.settings.contrastive
        due = weight > 0 and microbatch % every == 0
        return {"regression": 1.0} | ({"contrastive": weight * every} if due else {})

    def terms(self, batch: Pairs, weights: dict[str, float]) -> dict[str, Tensor]:
        spec, binds = self.model.specs[batch.dataset], (batch.affinity >= self.settings.binder).float()
        target, names = (batch.affinity - spec.mean) / spec.std, tuple(weights)
        return dict(zip(names, self.losses(names, batch.chains, batch.keep, batch.partners, target, binds)))

    def losses(self, names: tuple[str, ...], chains, keep, partners, target_B: Tensor, binds_B: Tensor) -> list[Tensor]:
        """Those terms of a microbatch; target_B: pKd in units of the training split."""
        encoded, found = self.model.encode(chains, keep), []
        for name in names:
            if name == "regression":
                found.append((self.model.bind(encoded, keep) - target_B).square().mean())
            else:
                vectors = self.model.vectors(encoded, keep)
                with torch.autocast(chains.device.type, enabled=False):
                    found.append(info_nce(vectors, partners, binds_B))
        return found

    def unreached(self, computed: set[tuple[str, str]]) -> list[torch.nn.Module]:
        if computed and not any(term == "contrastive" for _, term in computed):
            return [self.model.search]
        return super().unreached(computed)


class Affinity(TableWorkload):
    """Proteins that a frozen or trained encoder reads, and a head that tells how well two of them bind."""

    unit, metric = "pairs", "1 - Spearman"
    settings_class, sizes_class, spec_class = Settings, Sizes, Spec

    def problems(self) -> Iterator[Problem]:
        made, least = self.settings, self.settings.sites * self.settings.width
        if self.sizes.frozen and not self.sizes.weights:
            yield Problem("model.settings.frozen", "freezes an encoder of random weights", "set weights to its file")
        if not least <= made.shortest <= made.longest:
            why = f"is {made.shortest}, and chains have {least} (sites x width) to {made.longest} residues"
            yield Problem("data.workload_settings.shortest", why, "set it in between")
        for name, width in (("num_heads", self.sizes.width), ("head_heads", self.sizes.head_width)):
            if width % (2 * (heads := getattr(self.sizes, name))):
                yield Problem(
                    f"model.settings.{name}", f"{width} over {heads} heads", "make the width an even multiple"
                )
        for name, share, count in zip(SPLITS, (1.0, *self.held_out), made.clusters(self.held_out)):
            if share and not count:
                why = f"{made.num_clusters} clusters leave none for {name}"
                remedy = "raise it, or that share of data.split"
                yield Problem("data.workload_settings.num_clusters", why, remedy)

    def _folder(self, root: Path) -> Path:
        return root / self.config.data.root / "generated"

    def _file(self, root: Path) -> Path:
        return self._folder(root) / self.settings.file_name(self.held_out)

    def _weights(self, root: Path) -> Path | None:
        path = root / self.sizes.weights if self.sizes.weights else None
        if path is not None and not path.is_file():
            raise DataError(f"model.settings.weights: there is no file {path} -> name an encoder's")
        return path

    def _spec(self, mean: float = 0.0, std: float = 1.0, cached: bool = False) -> Spec:
        return Spec(NAME, self.settings.longest + 2, mean, std, self.sizes.width if cached else 0)

    def _encoder(self, root: Path) -> tuple[Encoder, Path]:
        """The frozen encoder, and where its embeddings are cached: by hash of its weights and of the data."""
        encoder = AffinityModel({NAME: self._spec()}, self.sizes).encoder.eval()
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
        if self.sizes.frozen and self.settings.cache:
            self._keep_embeddings(*self._encoder(root), path, log)

    def _keep_embeddings(self, encoder: Encoder, cache: Path, path: Path, log: Callable[[str], None]) -> None:
        if cache.exists():
            return
        with np.load(path) as file:
            given, trained = tokens(file["chains"]), 2 * int((file["split"] == 0).sum())
        device = "cuda" if torch.cuda.is_available() and self.config.training.device != "cpu" else "cpu"
        encoder.to(device)

        @torch.no_grad()
        def compute(numbers: np.ndarray) -> Tensor:
            some = given[numbers].to(device)
            return encoder(some, some != PAD).half()

        costs = frozen.tried(compute, len(given), AT_ONCE, cache.parent, device)
        seen = trained * self.config.stages.operator.epochs / len(given)
        if why := costs.against(seen, frozen.free_bytes(cache.parent)):
            log(f"embeddings are not cached: {why}")
        else:
            frozen.build(cache, compute, len(given), AT_ONCE, log)

    def open(self, root: Path, log: Callable[[str], None]) -> dict[str, Proteins]:
        weights, path, made = self._weights(root), self._file(root), self.settings
        cache = self._encoder(root)[1] if self.sizes.frozen and made.cache else None
        if cache is not None and not cache.exists():
            cache = None
        with np.load(path) as file:
            arrays = dict(file)
        splits = {name: np.flatnonzero(arrays["split"] == number) for number, name in enumerate(SPLITS)}
        train = arrays["measured"][splits["train"]]
        spec = self._spec(float(train.mean()), float(train.std()), cache is not None)
        found = (arrays[name] for name in ("chains", "pairs", "measured", "rule"))
        return {NAME: Proteins(NAME, spec, splits, made, path.name, *found, weights, cache)}

    def outlines(self, root: Path) -> dict[str, Outline]:
        """A cache that is not there yet is not counted on; one of another encoder is taken for its own."""
        cached = self.sizes.frozen and self.settings.cache and any(self._folder(root).glob(f"{CACHE}-*.npy"))
        spec, made = self._spec(cached=cached), self.settings
        residue_bytes = (2 * spec.embedded or 8) + 1  # float16 embeddings or an int64 token, and whether it is there
        pair_bytes = 20  # two numbers and a pKd
        total = made.num_clusters * made.members * spec.tokens * residue_bytes + made.num_pairs * pair_bytes
        return {NAME: Outline(spec, total)}

    def objective(self, datasets: Mapping[str, Proteins | Outline], stage: str, before) -> AffinityObjective:
        model = AffinityModel({name: dataset.spec for name, dataset in datasets.items()}, self.sizes)
        weights = getattr(datasets[NAME], "weights", None)
        if weights is not None:  # a checkpoint brings its own, and memory does not depend on them
            model.encoder.load_state_dict(read_weights(weights, model.encoder))
        return AffinityObjective(model, self.config.training, self.settings)

    def zeros(self, name: str, spec: Spec, size: int, device=None, calls: int = 1) -> Pairs:
        shape, kind = (size, 2, spec.tokens), (torch.half if spec.embedded else torch.int64)
        chains = torch.zeros((*shape, spec.embedded) if spec.embedded else shape, dtype=kind, device=device)
        keep = torch.ones(shape, dtype=torch.bool, device=device)
        partners = torch.zeros((size, 2), dtype=torch.int64, device=device)
        return Pairs(name, chains, keep, partners, torch.zeros(size, device=device), seed=0)

    def measure(self, model: AffinityModel, dataset: Proteins, numbers: np.ndarray, ranks, alive, final: bool):
        """Beside the model, what the rule itself reaches on the same noisy measurements: the most that can be."""
        proteins = np.unique(dataset.partners[numbers])

        def search(some: np.ndarray) -> np.ndarray:
            chains, keep = dataset.given(some, ranks.device)
            return model.vectors(model.encode(chains, keep), keep).cpu().numpy()

        predicted = predict(model, dataset, numbers, ranks, alive)
        vectors = np.array(shared_out(search, proteins, AT_ONCE, ranks, alive))
        measured, rule, chains = dataset.measured[numbers], dataset.rule[numbers], dataset.chains[proteins]
        partners = np.searchsorted(proteins, dataset.partners[numbers[measured >= self.settings.binder]])
        found = scores(predicted, measured) | recall(vectors[:, 0] @ vectors[:, 1].T, partners)
        best = scores(rule, measured) | recall(Rule(self.settings).affinity(chains, chains), partners)
        told = {
            "num_samples": len(numbers),
            "error": 1 - found["spearman"],
            "baseline": "composition",
            "baseline_error": 1 - scores(dataset.by_composition[numbers], measured)["spearman"],
            "share_of_rule": found["spearman"] / best["spearman"],
            **found,
            **{f"rule_{name}": value for name, value in best.items()},
            "candidates": len(proteins),
            "per_sample": {"samples": numbers.tolist(), "error": np.abs(predicted - measured).tolist()},  # [pKd]
        }
        return told, {"predicted": predicted, "measured": measured}

    def figures(self, drawn) -> dict[str, Callable[[], Figure]]:
        def affinity() -> Figure:
            with np.load(drawn.folder / runfolder.EXAMPLES) as file:
                return draw(drawn.results[NAME], file["predicted"], file["measured"])

        return {"affinity": affinity} if drawn.results else {}


@torch.no_grad()
def predict(model, dataset: Proteins, numbers: np.ndarray, ranks=ALONE, alive=lambda: None) -> np.ndarray:
    """pKd of pairs by their numbers, (P,) float32; ranks compute a share each, and have all."""

    def ask(some: np.ndarray) -> np.ndarray:
        return model(NAME, *dataset.given(dataset.partners[some], ranks.device)).cpu().numpy()

    return np.array(shared_out(ask, numbers, AT_ONCE, ranks, alive))


def ensemble(folders: Iterable[Path | str], split: str = "test") -> dict[str, dict[str, float]]:
    """Scores on a split of each run, by its name or, where another one has it, its folder; and of the mean prediction.

    Raises:
        DataError: the runs were not made for one data set.
    """
    found, made = {}, set()
    for run in map(Run, map(Path, folders)):
        (dataset,) = Affinity(run.config).open(project_root(), print).values()
        made.add(dataset.file_name)
        name = str(run.folder) if run.folder.name in found else run.folder.name
        found[name] = predict(run.load_model(), dataset, dataset.splits[split])
    if len(made) != 1:
        raise DataError(f"{', '.join(found)}: made for {len(made)} data sets -> choose runs of one")
    found["mean"] = np.mean(list(found.values()), axis=0)
    return {name: scores(predicted, dataset.measured[dataset.splits[split]]) for name, predicted in found.items()}
