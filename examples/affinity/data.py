"""Pairs of proteins whose affinity follows a hidden rule, so that the best reachable score is known.

The rule sees residues alone. Each place in a chain has features: how well each of a few motifs is matched there, and
the residue's hydrophobicity and charge. Two chains face each other, and features that face each other bind or repel,
less with distance. Energies of single residues are Li, Tang and Wingreen's reading of the Miyazawa-Jernigan contact
matrix (doi 10.1103/PhysRevLett.79.765): what is hydrophobic attracts its like, opposite charges attract. On top is
noise of known size, that of an assay.

Proteins come in clusters of mutants of one ancestor, and a cluster lies in one split as a whole.

Shape letters: P pairs, N proteins, L residues, F features of a chain, M motifs.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
from scipy.linalg import block_diag

from upsnb.runs.files import replacing
from upsnb.values import Fraction, NonNegativeFloat, PositiveFloat, PositiveInt, Section, Seed

RESIDUES = "LAGVSERTIDPKQNFYMHWC"  # in the order of ESM's vocabulary
HYDROPHOBICITY = dict(zip("ARNDCQEGHILKMFPSTWYV", (  # Kyte and Doolittle, doi 10.1016/0022-2836(82)90515-0
    1.8, -4.5, -3.5, -3.5, 2.5, -3.5, -3.5, -0.4, -3.2, 4.5, 3.8, -3.9, 1.9, 2.8, -1.6, -0.8, -0.7, -0.9, -1.3, 4.2
)))  # fmt: skip
CHARGE = {"K": 1.0, "R": 1.0, "D": -1.0, "E": -1.0}  # at pH 7
NONE = 255  # behind the end of a chain
ALMOST = 1 / 3  # what a motif is worth with one residue that is another


class Made(Section):
    """What is generated."""

    num_clusters: PositiveInt = 800
    members: PositiveInt = 4  # proteins of a cluster
    num_pairs: PositiveInt = 24_000
    shortest: PositiveInt = 28  # residues of a chain
    longest: PositiveInt = 46
    sites: PositiveInt = 4  # places of an ancestor where a motif stands
    mutated: Fraction = 0.4  # share of residues that a member draws again; a quarter of it at sites
    tried: PositiveInt = 24  # partners of which a binder takes the best; the other half of the pairs are at random
    num_motifs: PositiveInt = 6
    width: PositiveInt = 3  # residues of a motif
    decay: PositiveFloat = 5.0  # distance over which an energy falls to 1/e [residues]
    motif_share: Fraction = 0.6  # of the variance of affinities; the rest is of single residues
    mean: float = 6.0  # pKd of random pairs
    spread: PositiveFloat = 1.2  # its standard deviation
    noise: NonNegativeFloat = 0.4  # standard deviation of what is measured around the rule [pKd]
    seed: Seed = 0

    def file_name(self, held_out: tuple[float, float]) -> str:
        """It depends on all that the file does."""
        text = repr(([getattr(self, name) for name in sorted(Made.model_fields)], held_out))
        return f"affinity_n{self.num_pairs}_{hashlib.sha256(text.encode()).hexdigest()[:12]}.npz"

    def clusters(self, held_out: tuple[float, float]) -> tuple[int, ...]:
        """How many are for training, validation and test."""
        validation, test = (round(share * self.num_clusters) for share in held_out)
        return self.num_clusters - validation - test, validation, test


class Rule:
    """The affinity of any two chains: a product of what each brings, so that all pairs are one matrix product."""

    def __init__(self, made: Made):
        self.made, draw = made, np.random.default_rng((made.seed, 1))
        self.motifs = np.stack([draw.permutation(20)[: made.width] for _ in range(made.num_motifs)])
        couplings = draw.normal(size=(made.num_motifs, made.num_motifs))
        couplings = (couplings + couplings.T) / 2  # a motif binds some and repels others, either way round
        chains = make_chains(made, self.motifs, 1024 // made.members, np.random.default_rng((made.seed, 2)))
        of_motifs = block_diag(couplings, np.zeros((2, 2)))
        of_residues = block_diag(0 * couplings, np.diag((1.0, -1.0)))
        self.parts, self.offset = [], 0.0
        for part, share in ((of_motifs, made.motif_share), (of_residues, 1 - made.motif_share)):
            spread = self.affinity(chains[:512], chains[512:], part).std()
            self.parts.append(part * (made.spread * share**0.5 / spread))
        self.coupling = sum(self.parts)
        self.offset = made.mean - self.affinity(chains[:512], chains[512:]).mean()

    def features(self, chains: np.ndarray) -> np.ndarray:
        """(N, L) residues -> (N, L, M + 2): motifs that begin here, hydrophobicity, charge; zero behind the end.

        A motif is worth 1 where all its residues stand, ALMOST where all but one do, else nothing.
        """
        padded = np.pad(chains, ((0, 0), (0, self.made.width - 1)), constant_values=NONE)
        windows = np.lib.stride_tricks.sliding_window_view(padded, self.made.width, axis=1)
        missing = (windows[:, :, None] != self.motifs).sum(-1) + 2 * (windows[:, :, -1:] == NONE)
        table = np.zeros((256, 2))
        table[:20] = [(HYDROPHOBICITY[letter] / 4.5, CHARGE.get(letter, 0.0)) for letter in RESIDUES]
        table[:20, 0] -= table[:20, 0].mean()
        strength = np.select([missing == 0, missing == 1], [1.0, ALMOST])
        return np.concatenate((strength, table[chains]), axis=-1)

    def affinity(self, first: np.ndarray, second: np.ndarray, coupling: np.ndarray | None = None) -> np.ndarray:
        """pKd without noise of every chain (N, L) with every other one (K, L): (N, K).

        Args:
            coupling: (F, F) of features that face each other; None: the rule's own.
        """
        place = np.arange(first.shape[1])
        near = np.exp(-np.abs(place[:, None] - place) / self.made.decay)
        ours = self.features(first) @ (self.coupling if coupling is None else coupling)
        return ours.reshape(len(first), -1) @ (near @ self.features(second)).reshape(len(second), -1).T + self.offset


def make_chains(made: Made, motifs: np.ndarray, clusters: int, draw: np.random.Generator) -> np.ndarray:
    """(clusters * members, longest) residues, NONE behind the end; a cluster's members stand side by side."""
    place, chains = np.arange(made.longest), []
    for _ in range(clusters):
        ancestor, length = draw.integers(20, size=made.longest), draw.integers(made.shortest, made.longest + 1)
        rate = np.full(made.longest, made.mutated)
        for start in draw.choice(length // made.width, made.sites, replace=False) * made.width:
            ancestor[start : start + made.width] = motifs[draw.integers(made.num_motifs)]
            rate[start : start + made.width] /= 4
        for _ in range(made.members):
            mutant = np.where(draw.random(made.longest) < rate, draw.integers(20, size=made.longest), ancestor)
            chains.append(np.where(place < length, mutant, NONE))
    return np.array(chains, np.uint8)


def generate(made: Made, held_out: tuple[float, float], path: Path) -> None:
    """Write proteins, pairs and affinities; a reader never sees half a file.

    `held_out`: shares of clusters for validation and test.

    Arrays: chains (N, longest) uint8; cluster (N,) int64; pairs (P, 2) int64, two proteins of one split; split (P,)
    int8, 0 train, 1 validation, 2 test; rule (P,) float32 pKd without noise; measured (P,) float32 with it.
    """
    rule, draw = Rule(made), np.random.default_rng((made.seed, 3))
    chains = make_chains(made, rule.motifs, made.num_clusters, draw)
    cluster = np.repeat(np.arange(made.num_clusters), made.members)
    train, *others = made.clusters(held_out)
    split_of = np.repeat((1, 2, 0), (*others, train))[cluster]
    found = []
    for number in np.unique(split_of):
        proteins = np.flatnonzero(split_of == number)
        every = rule.affinity(chains[proteins], chains[proteins])
        count = round(made.num_pairs * len(proteins) / len(chains))
        first, tried = draw.integers(len(proteins), size=count), draw.integers(len(proteins), size=(count, made.tried))
        best = every[first[:, None], tried].argmax(axis=1) * (np.arange(count) % 2)  # every other one is at random
        pairs = np.unique(np.stack((first, tried[np.arange(count), best]), axis=1), axis=0)
        found.append((proteins[pairs], np.full(len(pairs), number, np.int8), every[tuple(pairs.T)]))
    pairs, split, exact = map(np.concatenate, zip(*found, strict=True))
    measured = exact + made.noise * draw.normal(size=len(exact))
    affinities = {"rule": exact.astype(np.float32), "measured": measured.astype(np.float32)}
    with replacing(path) as file:
        np.savez(file, chains=chains, cluster=cluster, pairs=pairs, split=split, **affinities)
