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
from upsnb.data.source import thinned
from upsnb.report import style
from upsnb.training import parallel
from upsnb.training.losses import Objective
from upsnb.training.workload import Workload

DEPTHS = (0.0, 0.25, 0.5, 0.75, 0.95)  # of a needle in its haystack: 0 is the beginning
CHOICES = 8  # second names to choose from, at most


class NextToken(Objective):
    """Cross-entropy of the next token within its document, over all positions or some at random."""

    TERMS = ("cross_entropy",)

    def weights(self, step: int, microbatch: int) -> dict[str, float]:
        return {"cross_entropy": 1.0}

    def terms(self, batch: TokenBatch, weights: dict[str, float]) -> dict[str, Tensor]:
        tokens, documents, targets = next_tokens(batch.tokens, batch.documents)
        hidden, count = self.model.hidden(tokens, documents), self.config.query_sampling.num_queries
        if count and count < tokens.shape[1]:  # the same ones on all ranks
            draws = torch.Generator().manual_seed(batch.seed)
            chosen = torch.randperm(tokens.shape[1], generator=draws)[:count].to(tokens.device, non_blocking=True)
            hidden, targets = hidden[:, chosen], targets[:, chosen]
        return {"cross_entropy": self.model.head(hidden, targets)}

    def idle(self, batch: TokenBatch) -> Tensor:
        return self.terms(batch, {})["cross_entropy"]


class LongContext(Workload):
    """Packed documents, next tokens, tokens per second."""

    unit, metric = "tokens", "perplexity"

    def __init__(self, config):
        super().__init__(config)
        self.settings = self.section(Settings, "data.workload_settings")
        self.sizes = self.section(Sizes, "model.settings")
        self.split = config.data.split.validation_fraction, config.data.split.test_fraction

    def units_per_pair(self) -> int:
        return self.settings.context

    def prepare(self, root: Path, log: Callable[[str], None]) -> None:
        data.prepare(self.settings, self.split, root, root / self.config.data.root, log)

    def open(self, root: Path, log: Callable[[str], None]) -> dict[str, Corpus]:
        folder = data.folder_of(self.settings, self.split, root, root / self.config.data.root)
        return {"text": data.opened(self._spec(), folder)}

    def outlines(self, root: Path) -> dict[str, Outline]:
        if self.settings.files:
            return self.open(root, print)
        chunks = sum(self.settings.rows(self.split).values())
        return {"text": Outline(self._spec(), 8 * chunks * (self.settings.context + 1))}

    def _spec(self) -> TokenSpec:
        return TokenSpec("text", self.settings.context, self.settings.vocabulary)

    def spec_from(self, values: dict) -> TokenSpec:
        return TokenSpec(**values)

    def objective(self, datasets, stage, before) -> NextToken:
        specs = {name: dataset.spec for name, dataset in datasets.items()}
        return NextToken(Decoder(specs, **vars(self.sizes)), self.config.training)

    def zeros(self, name: str, spec: TokenSpec, size: int, device=None, calls: int = 1) -> TokenBatch:
        tokens = torch.zeros(size, spec.context + 1, dtype=torch.int32, device=device)
        return TokenBatch(name, tokens, tokens.clone(), seed=0)

    @torch.no_grad()
    def evaluate(self, model, datasets, split, ranks, alive, fraction=1.0, examples=None, final=False):
        was_training, results = model.training, {}
        model.eval()
        for name, corpus in datasets.items():
            chosen = corpus.splits[split]
            if not len(chosen):
                continue
            chosen = thinned(chosen, max(1, round(fraction * len(chosen))))
            own, unigram = [], corpus.unigram()
            for sample in chosen[ranks.rank :: ranks.world_size]:
                alive()
                own.append((int(sample), *_by_context(model, corpus, sample, unigram, ranks.device)))
            asked = self._needles(model, corpus, ranks, alive) if final else []
            found = parallel.all_gather_objects(ranks, (own, asked))
            results[name] = _summary(corpus, sorted(row for rows, _ in found for row in rows))
            if answers := [answer for _, answers in found for answer in answers]:
                results[name] |= _answered(answers)
        model.train(was_training)
        return results

    def _needles(self, model: Decoder, corpus: Corpus, ranks, alive) -> list[tuple[float, bool, float]]:
        """(depth, whether the answer was right, chance) of this rank's share of the questions."""
        tokenizer, answers = data.TOKENIZERS[self.settings.tokenizer].load(corpus.folder / "tokenizer.json"), []
        for number in range(ranks.rank, len(DEPTHS) * self.settings.needles, ranks.world_size):
            alive()
            depth, draws = DEPTHS[number % len(DEPTHS)], np.random.default_rng((self.settings.seed, number))
            tokens, choices = data.haystack(tokenizer, corpus.spec.context, depth, draws, CHOICES)
            if len(choices) > 1 and len(tokens) <= corpus.spec.context:  # else names are no words of this corpus
                hidden = model.hidden(torch.tensor([tokens], device=ranks.device))[:, -1:]
                answers.append((depth, int(model.head(hidden)[0, 0, choices].argmax()) == 0, 1 / len(choices)))
        return answers

    def figures(self, drawn) -> dict[str, Callable[[], Figure]]:
        return {f"perplexity_{name}": partial(perplexity, result) for name, result in drawn.results.items()}


def _by_context(model: Decoder, corpus: Corpus, sample: int, unigram: np.ndarray, device) -> tuple:
    """Sums of losses and numbers of tokens by how much of the document was read, in powers of two; a unigram's sum."""
    chunk = [torch.from_numpy(part).to(device) for part in corpus.chunks(np.array([sample]))]
    tokens, documents, targets = next_tokens(*chunk)
    lengths = torch.bincount(documents[0]).tolist()  # one by one: a mask of a whole chunk has N^2 elements
    parts = zip(tokens.split(lengths, dim=1), targets.split(lengths, dim=1))
    losses = torch.cat([model.head(model.hidden(of), next_of, mean=False)[0] for of, next_of in parts])
    losses = losses.double().cpu().numpy()
    targets, owner = targets[0].cpu().numpy(), documents[0].cpu().numpy()
    known = targets != IGNORED
    read = 1 + np.arange(len(owner)) - np.searchsorted(owner, owner)
    size = int(np.ceil(np.log2(corpus.spec.context)))
    bins = np.minimum(np.log2(read[known]).astype(int), size - 1)  # a whole chunk is read once: no point of its own
    plain = -float(unigram[targets[known]].sum())
    return np.bincount(bins, losses[known], size), np.bincount(bins, minlength=size), plain


def _summary(corpus: Corpus, rows: list[tuple]) -> dict:
    samples, losses, counts, unigram = zip(*rows)
    total, tokens = np.sum(losses, axis=0), np.sum(counts, axis=0)
    bins = tokens > 0
    return {
        "error": float(np.exp(total.sum() / tokens.sum())),
        "baseline": "unigram",
        "baseline_error": float(np.exp(np.sum(unigram) / tokens.sum())),
        "num_samples": len(samples),
        "per_sample": {
            "samples": list(samples),
            "error": [float(np.exp(loss.sum() / count.sum())) for loss, count in zip(losses, counts)],
        },
        "by_context": {
            "read": [2**n for n in np.flatnonzero(bins).tolist()],
            "perplexity": np.exp(total[bins] / tokens[bins]).tolist(),
            "tokens": tokens[bins].tolist(),
        },
    }


def _answered(answers: list[tuple[float, bool, float]]) -> dict:
    right = {depth: [found for at, found, _ in answers if at == depth] for depth in sorted({at for at, *_ in answers})}
    _, found, chance = (float(np.mean(part)) for part in zip(*answers))
    told = {"depth": list(right), "right": [float(np.mean(some)) for some in right.values()], "chance": chance}
    return {"needles_right": found, "needle": told}


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
