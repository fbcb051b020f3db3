"""How good predicted affinities are, and a search for partners; what a model without a network reaches."""

from __future__ import annotations

import numpy as np
from matplotlib.figure import Figure
from scipy import stats

from upsnb.report.style import BLUE, GREY, empty_figure, label, legend, styled

TOP = (1, 5, 10)  # partners that a search names
AT_ONCE = 16_384  # pairs whose 441 products are in memory together


def scores(predicted: np.ndarray, measured: np.ndarray) -> dict[str, float]:
    """Spearman's and Pearson's correlation, NaN of a single pair, and the root mean squared error [pKd]."""
    several = len(measured) > 1
    return {
        "spearman": float(stats.spearmanr(predicted, measured).statistic) if several else float("nan"),
        "pearson": float(stats.pearsonr(predicted, measured).statistic) if several else float("nan"),
        "rmse": float(np.sqrt(np.mean((predicted - measured) ** 2))),
    }


def recall(likeness: np.ndarray, partners: np.ndarray) -> dict[str, float]:
    """Share of partners that are among the k most alike; other partners of the same first protein are left out.

    Args:
        likeness: (F, S) of each first protein to each second one; of equals, the partner comes last.
        partners: (K, 2) row and column.
    """
    ranks = []
    for row, column in partners:
        others = likeness[row].copy()
        others[partners[partners[:, 0] == row, 1]] = -np.inf
        ranks.append((others >= likeness[row, column]).sum())
    return {f"recall_at_{k}": float(np.mean(np.array(ranks) < k)) if ranks else float("nan") for k in TOP}


def by_composition(counts: np.ndarray, partners: np.ndarray, measured: np.ndarray, train: np.ndarray) -> np.ndarray:
    """pKd of all pairs by how often each residue stands in each chain: ridge regression on products of two counts.

    Args:
        counts: (N, 20).
        partners: (P, 2) numbers of proteins.
        measured: (P,).
        train: numbers of the pairs that may be learned from.
    """
    first, second = (np.pad(counts / 10, ((0, 0), (1, 0)), constant_values=1)[side] for side in partners.T)
    mean, squares, sums = measured[train].mean(), 10.0 * np.eye(21**2), 0.0
    for some in np.array_split(train, len(train) // AT_ONCE + 1):
        products = np.einsum("pi,pj->pij", first[some], second[some]).reshape(len(some), -1)
        squares += products.T @ products
        sums += products.T @ (measured[some] - mean)
    slopes = np.linalg.solve(squares, sums).reshape(21, 21)
    return ((first @ slopes) * second).sum(axis=1) + mean


@styled
def draw(found: dict, predicted: np.ndarray, measured: np.ndarray) -> Figure:
    """Every pair's pKd, predicted and measured, and how often a search finds a partner, beside the rule's own."""
    title = (
        f"Spearman {found['spearman']:.3f}, the rule itself {found['rule_spearman']:.3f}, {found['baseline']} "
        f"{1 - found['baseline_error']:.3f}; {found['num_samples']:,} pairs of proteins that were not trained on"
    )
    figure = empty_figure(7.2, 3.0, title)
    pairs, search = figure.subplots(1, 2)
    pairs.plot(measured, predicted, ".", color=BLUE, markersize=2, alpha=0.4, label="pairs")
    ends = [measured.min(), measured.max()]
    pairs.plot(ends, ends, "--", color=GREY, label="no error")
    pairs.set(xlabel=label("measured", "pKd"), ylabel=label("predicted", "pKd"))
    for whose, name, style in (("", "model", "o-"), ("rule_", "the rule", "s--")):
        color = GREY if whose else BLUE
        search.plot(TOP, [found[f"{whose}recall_at_{k}"] for k in TOP], style, color=color, label=name)
    search.plot(TOP, [k / found["candidates"] for k in TOP], ":", color=GREY, label="chance")
    search.set(xlabel=label("proteins named, k"), ylabel=label("partners found"), ylim=(0, 1), xticks=TOP)
    legend(pairs), legend(search)
    return figure
