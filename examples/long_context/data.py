"""Text to packed chunks of tokens in memory-mapped shards, and a small corpus for when there is no text.

A chunk is a row of `context + 1` tokens of one stream of documents; beside each token stands which document of the
chunk it is of. Documents belong to one split each. A shard is a pair of .npy files, whole whenever it is there.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from hashlib import sha256
from itertools import islice
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from upsnb.data.batch import Microbatch, TensorBatch
from upsnb.errors import DataError
from upsnb.values import PositiveInt, Section, Seed

SPLITS = ("train", "validation", "test")
SHARD = 2**27  # tokens of one shard at most
PIECE = re.compile(r" ?\w+|\s|[^\w\s]")  # words with the space before them, signs
LEARNED = 2**21  # characters that a vocabulary is taken from
VERSION = 2  # of shards, and of what is generated
DOCUMENT_END = "\f"  # in a text file; the end of a file is one as well


# -- text ----------------------------------------------------------------------------------------------------------

NAMES = [a + b for a in ("Al", "Bren", "Cor", "Dal", "El", "Far", "Gar", "Hol") for b in ("a", "in", "mund", "wyn")]
PLACES = [a + b for a in ("Ash", "Birch", "Clay", "Dun", "East", "Fern") for b in ("ford", "ham", "mere", "wick")]
TRADES = "baker cooper dyer farmer fisher glazier joiner mason miller potter saddler smith tailor weaver".split()
ANIMALS = "cat cow crow dog duck goat goose hare horse mule owl pig sheep toad".split()
COLOURS = "black blue brown green grey red white yellow".split()
KEY = "{name} {place} keeps the key."  # what a needle says, and haystacks say of others
SENTENCES = (
    "The {trade} {name} {place} has a {colour} {animal}.",
    "On market day the {trade} {name} {place} walks with the {colour} {animal}.",
    "The {colour} {animal} sleeps where {name} {place} sings.",
    "When it rains the {trade} {name} {place} stays at home with the {colour} {animal}.",
    "They say that {name} {place} was born on the day the {colour} {animal} came.",
    KEY,
)


def villagers(draws: np.random.Generator, count: int) -> list[dict[str, str]]:
    """People with a second name, a trade, an animal and its colour, which stay theirs throughout a document."""
    kinds = {"name": NAMES, "place": PLACES, "trade": TRADES, "animal": ANIMALS, "colour": COLOURS}
    own = [draws.permutation(values)[:count].tolist() for values in kinds.values()]
    return [dict(zip(kinds, values)) for values in zip(*own)]


def sentence(draws: np.random.Generator, people: list[dict[str, str]]) -> str:
    """Of one of them, whoever."""
    return SENTENCES[draws.integers(len(SENTENCES))].format(**people[draws.integers(len(people))])


def documents(seed: int) -> Iterator[str]:
    """Documents without end: six people each, told of again and again, so that who has read more knows more."""
    for number in range(2**62):
        draws = np.random.default_rng((seed, number))
        people, count = villagers(draws, 6), int(draws.integers(20, 240))
        yield " ".join(sentence(draws, people) for _ in range(count))


def texts(files: list[Path]) -> Iterator[str]:
    """Documents of text files."""
    for file in files:
        yield from filter(str.strip, file.read_text(encoding="utf-8", errors="replace").split(DOCUMENT_END))


# -- tokens --------------------------------------------------------------------------------------------------------


class Words:
    """Frequent words and signs are a token each; all else is its bytes. A vocabulary is at least those and the end."""

    end = 256  # the token after each document

    def __init__(self, pieces: list[str]):
        self.pieces, self.numbers = pieces, {piece: 257 + n for n, piece in enumerate(pieces)}

    @classmethod
    def learned(cls, corpus: Iterator[str], size: int) -> Words:
        """Of the beginning of a corpus."""
        counts, read = Counter(), 0
        for text in corpus:
            counts.update(PIECE.findall(text))
            read += len(text)
            if read > LEARNED:
                break
        return cls([piece for piece, _ in counts.most_common(size - 257)])

    @classmethod
    def load(cls, path: Path) -> Words:
        return cls(json.loads(path.read_text()))

    def save(self, path: Path) -> None:
        path.write_text(json.dumps(self.pieces))

    def encode(self, text: str) -> list[int]:
        tokens: list[int] = []
        for piece in PIECE.findall(text):
            tokens.extend([self.numbers[piece]] if piece in self.numbers else piece.encode())
        return tokens

    def decode(self, tokens: list[int]) -> str:
        parts = (self.pieces[token - 257].encode() if token > 256 else bytes([token]) for token in tokens)
        return b"".join(parts).decode(errors="replace")


class Bpe:
    """Byte-pair encoding by the package `tokenizers`, which is optional."""

    end = 0

    def __init__(self, made):
        self.made = made

    @classmethod
    def learned(cls, corpus: Iterator[str], size: int) -> Bpe:
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

        made, alphabet = Tokenizer(models.BPE()), pre_tokenizers.ByteLevel.alphabet()
        made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=size, special_tokens=["<end>"], initial_alphabet=alphabet, show_progress=False
        )
        made.train_from_iterator(islice(corpus, 10_000), trainer)
        return cls(made)

    @classmethod
    def load(cls, path: Path) -> Bpe:
        from tokenizers import Tokenizer

        return cls(Tokenizer.from_file(str(path)))

    def save(self, path: Path) -> None:
        self.made.save(str(path))

    def encode(self, text: str) -> list[int]:
        return self.made.encode(text).ids

    def decode(self, tokens: list[int]) -> str:
        return self.made.decode(tokens)


TOKENIZERS = {"words": Words, "bpe": Bpe}


# -- chunks --------------------------------------------------------------------------------------------------------


class Settings(Section):
    """What `data.workload_settings` may say."""

    context: PositiveInt = 2048  # tokens that the model sees
    vocabulary: Annotated[int, Field(ge=258, le=2**16)] = 512  # bytes, the end of a document, and what is learned
    tokenizer: Literal["words", "bpe"] = "words"
    files: tuple[str, ...] = ()  # text files or globs of them, from the project's folder; empty: generated
    chunks: PositiveInt = 640  # generated, of all splits
    seed: Seed = 0  # of the corpus, and of which document is in which split
    needles: PositiveInt = 6  # questions at each depth, after training

    def rows(self, split: tuple[float, float]) -> dict[str, int]:
        """Chunks of each split of a generated corpus."""
        kept = dict(zip(("validation", "test"), (round(share * self.chunks) for share in split)))
        return {"train": self.chunks - sum(kept.values()), **kept}


def text_files(settings: Settings, root: Path) -> list[Path]:
    """Those that are named; none: the corpus is generated.

    Raises:
        DataError: none of them is there.
    """
    files = [path for name in settings.files for path in sorted(root.glob(name))]
    if settings.files and not files:
        raise DataError(f"workload_settings.files: {', '.join(settings.files)} not found in {root} -> correct them")
    return files


def folder_of(settings: Settings, split: tuple[float, float], root: Path, data: Path) -> Path:
    """Where the shards lie: the name depends on all that they do."""
    known = [(str(path), path.stat().st_size, path.stat().st_mtime_ns) for path in text_files(settings, root)]
    what = repr((settings.model_copy(update={"needles": 0}), split, known, VERSION))
    return data / f"long_context_{settings.context}_{sha256(what.encode()).hexdigest()[:10]}"


def packed(stream: Iterator[list[int]], context: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Chunks of tokens and of document numbers, (context + 1,) each; the last token of one begins the next."""
    tokens, owners = np.empty(0, np.uint16), np.empty(0, np.int64)
    for number, more in enumerate(stream):
        tokens = np.concatenate([tokens, np.array(more, np.uint16)])
        owners = np.concatenate([owners, np.full(len(more), number)])
        while len(tokens) > context:
            yield tokens[: context + 1], (owners[: context + 1] - owners[0]).astype(np.uint16)
            tokens, owners = tokens[context:], owners[context:]


def write_shards(folder: Path, split: str, chunks: Iterator[tuple[np.ndarray, np.ndarray]], context: int) -> int:
    """Chunks of a split to .npy files; how many there were."""
    total = 0
    while rows := list(islice(chunks, max(1, SHARD // (context + 1)))):
        for what, values in zip(("tokens", "documents"), zip(*rows)):
            np.save(folder / f"{split}_{total:09d}_{what}.npy", np.stack(values))
        total += len(rows)
    return total


def prepare(settings: Settings, split: tuple[float, float], root: Path, data: Path, log: Callable) -> Path:
    """Tokenise and pack what is not there yet; the folder of the shards.

    Args:
        split: shares of documents for validation and test.
        root: folder that files are named from.
        data: folder for shards.
    Raises:
        DataError: a file that is named is not there, or the text has no whole chunk.
    """
    folder, files = folder_of(settings, split, root, data), text_files(settings, root)
    if (folder / "index.json").exists():
        return folder
    log(f"tokenising into {folder.name}")
    kind = TOKENIZERS[settings.tokenizer]
    tokenizer = kind.learned(texts(files) if files else documents(settings.seed), settings.vocabulary)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(folder / "tokenizer.json")
    rows, wanted = {}, settings.rows(split)
    for number, name in enumerate(wanted):
        if files:
            chosen = (text for n, text in enumerate(texts(files)) if split_of(n, settings.seed, split) == name)
        else:
            chosen = documents(settings.seed + 1_000_003 * (number + 1))
        chunks = packed((tokenizer.encode(text) + [tokenizer.end] for text in chosen), settings.context)
        rows[name] = write_shards(folder, name, chunks if files else islice(chunks, wanted[name]), settings.context)
    if not rows["train"]:
        raise DataError(f"workload_settings.context: the text has no {settings.context} tokens -> lower it")
    unfinished = folder / ".index.json"
    unfinished.write_text(json.dumps(rows))
    unfinished.replace(folder / "index.json")  # last: the shards are whole
    return folder


def split_of(document: int, seed: int, split: tuple[float, float]) -> str:
    """Which split a document of a text is in, by its number alone."""
    place = np.random.default_rng((seed, document)).random()
    return "validation" if place < split[0] else "test" if place < sum(split) else "train"


@dataclass(frozen=True)
class TokenSpec:
    """What the model must know of a corpus."""

    name: str
    context: int
    vocabulary: int

    @property
    def grid_shape(self) -> tuple[int, ...]:
        """Positions that a loss can be taken at."""
        return (self.context,)


@dataclass
class TokenBatch(TensorBatch):
    """Chunks of tokens, and which document of its chunk each is of: (B, context + 1) int32."""

    dataset: str
    tokens: Tensor
    documents: Tensor
    seed: int
    turn: int = 0


@dataclass(frozen=True)
class Corpus:
    """Packed shards, ready to be read; a sample is a chunk."""

    name: str
    folder: Path
    spec: TokenSpec
    rows: dict[str, int]  # chunks by split

    @property
    def splits(self) -> dict[str, np.ndarray]:
        ends = np.cumsum(list(self.rows.values()))
        return {name: np.arange(end - self.rows[name], end) for name, end in zip(self.rows, ends)}

    @property
    def num_bytes(self) -> int:
        """Of all chunks on a device."""
        return 8 * sum(self.rows.values()) * (self.spec.context + 1)

    @property
    def about(self) -> dict:
        files = [path.name for path in sorted(self.folder.glob("*_tokens.npy"))]
        return {"files": files, "context": self.spec.context, "vocabulary": self.spec.vocabulary}

    def pairs(self, split: str, calls: int = 1) -> np.ndarray:
        """(P, 2) int64: a chunk is a training pair."""
        return np.stack([self.splits[split], np.zeros(self.rows[split], np.int64)], axis=1)

    def chunks(self, samples: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Tokens and document numbers of chunks, (B, context + 1) int32, from the shards."""
        found = tuple(np.empty((len(samples), self.spec.context + 1), np.int32) for _ in range(2))
        for split, own in self.splits.items():
            for path in sorted(self.folder.glob(f"{split}_*_tokens.npy")):
                first = int(path.name.split("_")[1]) + (own[0] if len(own) else 0)
                pair = (np.load(path.with_name(path.name.replace("tokens", what)), mmap_mode="r")
                        for what in ("tokens", "documents"))  # fmt: skip
                for values, shard in zip(found, pair):
                    here = (samples >= first) & (samples < first + len(shard))
                    values[here] = shard[samples[here] - first]
        return found

    def resident(self, device: torch.device) -> tuple[Tensor, ...]:
        return tuple(torch.from_numpy(x).to(device) for x in self.chunks(np.arange(sum(self.rows.values()))))

    def read(self, microbatch: Microbatch, calls: int, resident: tuple[Tensor, ...] | None = None) -> TokenBatch:
        samples = microbatch.pairs[:, 0]
        if resident is None:
            tensors = map(torch.from_numpy, self.chunks(samples))
        else:
            chosen = torch.from_numpy(samples).to(resident[0].device, non_blocking=True)
            tensors = (x[chosen] for x in resident)
        return TokenBatch(self.name, *tensors, seed=microbatch.seed, turn=microbatch.turn)

    def unigram(self) -> np.ndarray:
        """Log-probability of each token in the training split, one added to each count, (V,)."""
        counts = np.ones(self.spec.vocabulary)
        for path in self.folder.glob("train_*_tokens.npy"):
            counts += np.bincount(np.load(path, mmap_mode="r").ravel(), minlength=self.spec.vocabulary)
        return np.log(counts / counts.sum())


def opened(spec: TokenSpec, folder: Path) -> Corpus:
    """The corpus that `prepare` left in a folder.

    Raises:
        DataError: it has not been there.
    """
    if not (folder / "index.json").exists():
        raise DataError(f"{folder} is not there -> start a run, which tokenises the text")
    return Corpus(spec.name, folder, spec, json.loads((folder / "index.json").read_text()))


def haystack(tokenizer, context: int, depth: float, draws: np.random.Generator, choices: int):
    """A document in which one sentence names somebody in full, and the first name again, which is to be completed.

    Returns:
        at most `context` tokens, and first tokens of second names to choose from, all different, the right one first.
    """
    asked, *others = villagers(draws, 7)
    said: list[list[int]] = []
    while sum(map(len, said)) < context - 48:  # room for the needle and the question
        said.append(tokenizer.encode(" " * bool(said) + sentence(draws, others)))
    said.insert(round(depth * len(said)), tokenizer.encode(" " + KEY.format(**asked)))
    question = tokenizer.encode(f" {asked['name']}")
    places = (f" {place}" for place in (asked["place"], *draws.permutation(PLACES)))
    return [*sum(said, []), *question], [*dict.fromkeys(tokenizer.encode(place)[0] for place in places)][:choices]
