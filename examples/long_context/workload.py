"""A language model of long documents: loss, perplexity by what was read before, a needle in a haystack."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import torch
from matplotlib.figure import Figure
from torch import Tensor

from examples.long_context import data
from examples.long_context.data import Corpus, Settings, TokenBatch, TokenSpec
from examples.long_context.model import IGNORED, Decoder, Sizes, next_tokens
from upsnb.data.datasets import Outline
from upsnb.report import style
from upsnb.training.tables import PlainObjective, TableWorkload, shared_out

DEPTHS = (0.0, 0.25, 0.5, 0.75, 0.95)  # of a needle in its haystack: 0 is the beginning
CHOICES = 8  # second names to choose from, at most


class NextToken(PlainObjective):
    """Cross-entropy of the next token within its document, over all positions or some at random."""

    TERMS = ("cross_entropy",)

    def terms(self, batch: TokenBatch, weights: dict[str, float]) -> dict[str, Tensor]:
        tokens, documents, targets = next_tokens(batch.tokens, batch.documents)
        hidden, count = self.model.hidden(tokens, documents), self.config.query_sampling.num_queries
        if count and count < tokens.shape[1]:  # the same ones on all ranks
            draws = torch.Generator().manual_seed(batch.seed)
            chosen = torch.randperm(tokens.shape[1], generator=draws)[:count].to(tokens.device, non_blocking=True)
            hidden, targets = hidden[:, chosen], targets[:, chosen]
        return {"cross_entropy": self.model.head(hidden, targets)}


class LongContext(TableWorkload):
    """Packed documents, next tokens, tokens per second."""

    unit, metric = "tokens", "perplexity"
    settings_class, sizes_class, spec_class = Settings, Sizes, TokenSpec

    def units_per_pair(self) -> int:
        return self.settings.context

    def prepare(self, root: Path, log: Callable[[str], None]) -> None:
        data.prepare(self.settings, self.held_out, root, root / self.config.data.root, log)

    def open(self, root: Path, log: Callable[[str], None]) -> dict[str, Corpus]:
        place = data.place_of(self.settings, self.held_out, root, root / self.config.data.root)
        return {"text": data.opened(self._spec(), place)}

    def outlines(self, root: Path) -> dict[str, Outline]:
        if self.settings.files:
            return self.open(root, print)
        return {"text": Outline(self._spec(), self.settings.chunks * self._spec().num_bytes)}

    def _spec(self) -> TokenSpec:
        return TokenSpec("text", self.settings.context, self.settings.vocabulary)

    def objective(self, datasets, stage, before) -> NextToken:
        specs = {name: dataset.spec for name, dataset in datasets.items()}
        return NextToken(Decoder(specs, self.sizes), self.config.training)

    def zeros(self, name: str, spec: TokenSpec, size: int, device=None, calls: int = 1) -> TokenBatch:
        tokens = torch.zeros(size, spec.context + 1, dtype=torch.int32, device=device)
        return TokenBatch(name, tokens, tokens.clone(), seed=0)

    def measure(self, model: Decoder, corpus: Corpus, samples: np.ndarray, ranks, alive, final: bool):
        unigram = corpus.unigram()

        def ask(some: np.ndarray):
            return [by_context(model, corpus, sample, unigram, ranks.device) for sample in some]

        losses, counts, plain = map(np.array, zip(*shared_out(ask, samples, 1, ranks, alive)))
        read = np.flatnonzero(counts.sum(axis=0))
        by_read, tokens = losses.sum(axis=0)[read], counts.sum(axis=0)[read]
        found = {
            "error": float(np.exp(losses.sum() / counts.sum())),
            "baseline": "unigram",
            "baseline_error": float(np.exp(plain.sum() / counts.sum())),
            "num_samples": len(samples),
            "per_sample": {
                "samples": samples.tolist(),
                "error": np.exp(losses.sum(axis=1) / counts.sum(axis=1)).tolist(),
            },
            "by_context": {
                "read": (2**read).tolist(),
                "perplexity": np.exp(by_read / tokens).tolist(),
                "tokens": tokens.tolist(),
            },
        }
        return found | (self._needles(model, corpus, ranks, alive) if final else {}), {}

    def _needles(self, model: Decoder, corpus: Corpus, ranks, alive) -> dict:
        """How often a needle is found, by its depth; nothing where names are no words of this corpus."""

        def ask(numbers: np.ndarray):
            for number in numbers.tolist():
                depth, draws = DEPTHS[number % len(DEPTHS)], np.random.default_rng((self.settings.seed, number))
                tokens, choices = data.haystack(corpus.tokenizer, corpus.spec.context, depth, draws, CHOICES)
                if len(choices) > 1 and len(tokens) <= corpus.spec.context:
                    hidden = model.hidden(torch.tensor([tokens], device=ranks.device))[:, -1:]
                    yield depth, int(model.head(hidden)[0, 0, choices].argmax()) == 0, 1 / len(choices)

        answers = shared_out(ask, np.arange(len(DEPTHS) * self.settings.needles), 1, ranks, alive)
        if not answers:
            return {}
        depths, right, chance = map(np.array, zip(*answers))
        told = {"depth": np.unique(depths).tolist(), "chance": float(chance.mean())}
        told["right"] = [float(right[depths == depth].mean()) for depth in told["depth"]]
        return {"needles_right": float(right.mean()), "needle": told}

    def figures(self, drawn) -> dict[str, Callable[[], Figure]]:
        return {f"perplexity_{name}": partial(perplexity, result) for name, result in drawn.results.items()}


def by_context(model: Decoder, corpus: Corpus, sample: int, unigram: np.ndarray, device) -> tuple:
    """Sums of losses and numbers of tokens by how much of the document was read, in powers of two; a unigram's sum."""
    tokens, documents, targets = next_tokens(*(part.to(device) for part in corpus.chunks(np.array([sample]))))
    lengths = torch.bincount(documents[0]).tolist()  # one by one: a mask of a whole chunk has N^2 elements
    parts = zip(tokens.split(lengths, dim=1), targets.split(lengths, dim=1))
    losses = torch.cat([model.head(model.hidden(of), next_of, mean=False)[0] for of, next_of in parts])
    targets = targets[0].cpu().numpy()
    known, size = targets != IGNORED, int(np.ceil(np.log2(corpus.spec.context)))
    read = np.concatenate([1 + np.arange(length) for length in lengths])[known]
    bins = np.minimum(np.log2(read).astype(int), size - 1)  # a whole chunk is read once: no point of its own
    losses = losses.double().cpu().numpy()[known]
    return np.bincount(bins, losses, size), np.bincount(bins, minlength=size), -unigram[targets[known]].sum()


@style.styled
def perplexity(result: dict) -> Figure:
    """Perplexity by how much of a document was read before, and needles found by depth where they were sought."""
    found, needle = result["by_context"], result.get("needle")
    first, last = found["perplexity"][0], found["perplexity"][-1]
    title = f"Perplexity {first:.3g} after one token of a document, {last:.3g} after {found['read'][-1]:,}"
    figure = style.empty_figure(7.2, 2.8, title)
    axes = figure.subplots(1, 2 if needle else 1, squeeze=False)[0]
    axes[0].plot(found["read"], found["perplexity"], marker="o", color=style.BLACK, label="model")
    axes[0].axhline(result["baseline_error"], color=style.GREY, label="unigram")
    axes[0].set(xscale="log", yscale="log", xlabel=style.label("tokens read before"), ylabel=style.label("perplexity"))
    if needle:
        axes[1].plot(needle["depth"], needle["right"], marker="o", color=style.BLACK, label="model")
        axes[1].axhline(needle["chance"], color=style.GREY, label="chance")
        axes[1].set(ylim=(0, 1.05), xlabel=style.label("depth of the needle"), ylabel=style.label("share found"))
    for ax in axes:
        style.legend(ax)
    return figure
