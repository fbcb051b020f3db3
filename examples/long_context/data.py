"""Text to packed chunks of tokens in a memory-mapped file, and a small corpus for when there is no text.

A chunk is a row of `context + 1` tokens of one stream of documents; beside each token stands which document of the
chunk it is of. Documents belong to one split each. The file holds (chunks, 2, context + 1) uint16, split by split.
"""

from __future__ import annotations

import glob
import json
import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
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
from upsnb.runs.files import replacing, write_json
from upsnb.training.tables import SPLITS, Table
from upsnb.values import NonNegativeInt, PositiveInt, Section, Seed

PIECE = re.compile(r" ?\w+|\s|[^\w\s]")  # words with the space before them, signs
LEARNED = 2**21  # characters that a vocabulary is taken from
VERSION = 4  # of chunks as they lie on the disk, and of what is generated
CHUNKS, INDEX = ".bin", ".json"  # endings: of the chunks, and of what is to be known of them
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


def documents(seed: int, context: int = 0) -> Iterator[str]:
    """Documents without end: six people each, told of again and again, so that who has read more knows more.

    Args:
        context: tokens that the longest are to have about as many of; a sentence has about eleven.
    """
    longest = max(240, context // 12)
    for number in range(2**62):
        draws = np.random.default_rng((seed, number))
        people, count = villagers(draws, 6), int(draws.integers(20, longest))
        yield " ".join(sentence(draws, people) for _ in range(count))


def texts(files: list[Path]) -> Iterator[str]:
    """Documents of text files, one after another."""
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
    def loaded(cls, text: str) -> Words:
        return cls(json.loads(text))

    def saved(self) -> str:
        return json.dumps(self.pieces)

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
    def loaded(cls, text: str) -> Bpe:
        from tokenizers import Tokenizer

        return cls(Tokenizer.from_str(text))

    def saved(self) -> str:
        return self.made.to_str(pretty=True)

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
    needles: NonNegativeInt = 6  # questions at each depth, after training


def text_files(settings: Settings, root: Path) -> list[Path]:
    """Those that are named, each once; none: the corpus is generated.

    Raises:
        DataError: a name that no file has.
    """
    found = {name: sorted(glob.glob(str(root / name), recursive=True)) for name in settings.files}
    if missing := [name for name, paths in found.items() if not paths]:
        raise DataError(f"workload_settings.files: {', '.join(missing)} not found in {root} -> correct them")
    return [Path(path) for path in dict.fromkeys(path for paths in found.values() for path in paths)]


def place_of(settings: Settings, split: tuple[float, float], root: Path, data: Path) -> Path:
    """Where the chunks lie, without CHUNKS and INDEX: the name depends on all that they do."""
    known = [(str(path), path.stat().st_size, path.stat().st_mtime_ns) for path in text_files(settings, root)]
    what = repr((settings.model_copy(update={"needles": 0}), split, known, VERSION))
    return data / f"long_context_{settings.context}_{sha256(what.encode()).hexdigest()[:10]}"


def packed(stream: Iterator[list[int]], context: int) -> Iterator[np.ndarray]:
    """Chunks, (2, context + 1) uint16: tokens, and numbers of documents. The last token of one begins the next."""
    tokens, owners = np.empty(0, np.uint16), np.empty(0, np.int64)
    for number, more in enumerate(stream):
        tokens = np.concatenate([tokens, np.array(more, np.uint16)])
        owners = np.concatenate([owners, np.full(len(more), number)])
        while len(tokens) > context:
            yield np.stack([tokens[: context + 1], (owners[: context + 1] - owners[0]).astype(np.uint16)])
            tokens, owners = tokens[context:], owners[context:]


def split_of(text: str, seed: int, split: tuple[float, float]) -> str:
    """Which split a document is in: by what it says alone, so that one that comes twice is in one of them."""
    place = int(sha256(f"{seed} {text}".encode()).hexdigest()[:13], 16) / 16**13
    return "validation" if place < split[0] else "test" if place < sum(split) else "train"


def prepare(settings: Settings, split: tuple[float, float], root: Path, data: Path, log: Callable) -> Path:
    """Tokenise and pack what is not there yet, as `place_of` says; what is there is whole.

    Args:
        split: shares of documents for validation and test.
        root: folder that files are named from.
        data: folder for what is made.
    Raises:
        DataError: a file that is named is not there, or a split that is asked for has no whole chunk of the text.
    """
    place, files, seed = place_of(settings, split, root, data), text_files(settings, root), settings.seed
    if place.with_suffix(INDEX).exists():
        return place
    log(f"tokenising into {place.name}")
    data.mkdir(parents=True, exist_ok=True)
    corpus = texts(files) if files else documents(seed, settings.context)
    tokenizer = TOKENIZERS[settings.tokenizer].learned(corpus, settings.vocabulary)
    held_out = [round(share * settings.chunks) for share in split]
    generated = dict(zip(SPLITS, (settings.chunks - sum(held_out), *held_out)))
    content, rows = sha256(tokenizer.saved().encode()), dict.fromkeys(SPLITS, 0)
    with replacing(place.with_suffix(CHUNKS)) as file:
        for number, name in enumerate(SPLITS, start=1):
            if files:
                chosen = (text for text in texts(files) if split_of(text, seed, split) == name)
            else:
                chosen = documents(seed + 1_000_003 * number, settings.context)
            stream = (tokenizer.encode(text) + [tokenizer.end] for text in chosen)
            for chunk in islice(packed(stream, settings.context), None if files else generated[name]):
                content.update(chunk)
                rows[name] += file.write(chunk) // chunk.nbytes
        if empty := [name for name, share in zip(SPLITS, (1.0, *split)) if share and not rows[name]]:
            where, remedy = ("files", "give more documents, apart by form feeds") if files else ("chunks", "raise it")
            raise DataError(
                f"workload_settings.{where}: nothing of {settings.context + 1} tokens for {' and '.join(empty)} -> "
                f"{remedy}, lower workload_settings.context, or set that share of data.split to 0"
            )
    known = {"rows": rows, "content": content.hexdigest()[:16], "kind": settings.tokenizer}
    write_json(place.with_suffix(INDEX), known | {"tokenizer": tokenizer.saved()})
    return place


@dataclass(frozen=True)
class TokenSpec:
    """What the model must know of a corpus."""

    name: str
    context: int
    vocabulary: int
    content: str = ""  # hash of tokens and tokenizer; empty: nothing is tokenised yet

    @property
    def grid_shape(self) -> tuple[int, ...]:
        """Positions that a loss can be taken at."""
        return (self.context,)

    @property
    def num_bytes(self) -> int:
        """Of a chunk on a device."""
        return 8 * (self.context + 1)


@dataclass
class TokenBatch(TensorBatch):
    """Chunks of tokens, and which document of its chunk each is of: (B, context + 1) int32."""

    dataset: str
    tokens: Tensor
    documents: Tensor
    seed: int
    turn: int = 0


@dataclass(frozen=True)
class Corpus(Table):
    """Packed chunks, ready to be read; each is a sample and a training pair."""

    name: str
    place: Path
    spec: TokenSpec
    rows: dict[str, int]  # chunks by split
    tokenizer: Words | Bpe

    @property
    def splits(self) -> dict[str, np.ndarray]:
        ends = np.cumsum(list(self.rows.values()))
        return dict(zip(self.rows, np.split(np.arange(ends[-1]), ends[:-1])))

    @property
    def num_bytes(self) -> int:
        return sum(self.rows.values()) * self.spec.num_bytes

    @property
    def about(self) -> dict:
        return {key: getattr(self.spec, key) for key in ("content", "context", "vocabulary")}

    @property
    def tables(self) -> tuple[Tensor, Tensor]:
        """Tokens and numbers of documents as they lie on the disk, (chunks, context + 1) uint16.

        They are opened anew, because a memory map is pickled whole.
        """
        chunks = np.memmap(self.place.with_suffix(CHUNKS), np.uint16, "c").reshape(-1, 2, self.spec.context + 1)
        return torch.from_numpy(chunks).unbind(1)

    def chunks(self, samples: np.ndarray) -> tuple[Tensor, ...]:
        """Tokens and numbers of documents, (B, context + 1) int32."""
        return tuple(table[samples].int() for table in self.tables)

    def resident(self, device: torch.device) -> tuple[Tensor, ...]:
        return tuple(table.int().to(device) for table in self.tables)

    def batch(self, tables: tuple[Tensor, ...], samples: Tensor, microbatch: Microbatch) -> TokenBatch:
        chosen = (table[samples].int() for table in tables)
        return TokenBatch(self.name, *chosen, seed=microbatch.seed, turn=microbatch.turn)

    def unigram(self) -> np.ndarray:
        """Log-probability of each token in the training split, one added to each count, (V,)."""
        counts = np.ones(self.spec.vocabulary)
        for chunk in self.tables[0][: self.rows["train"]].numpy():
            counts += np.bincount(chunk, minlength=self.spec.vocabulary)
        return np.log(counts / counts.sum())


def opened(spec: TokenSpec, place: Path) -> Corpus:
    """The corpus that `prepare` left in a place.

    Raises:
        DataError: it has not been there.
    """
    if not place.with_suffix(INDEX).exists():
        raise DataError(f"{place.with_suffix(INDEX)} is not there -> start a run, which tokenises the text")
    known = json.loads(place.with_suffix(INDEX).read_text())
    tokenizer = TOKENIZERS[known["kind"]].loaded(known["tokenizer"])
    return Corpus(spec.name, place, replace(spec, content=known["content"]), known["rows"], tokenizer)


def haystack(tokenizer, context: int, depth: float, draws: np.random.Generator, choices: int):
    """A document in which one sentence names somebody in full, and the first name again, which is to be completed.

    Returns:
        at most `context` tokens, and first tokens of second names to choose from, all different, the right one first.
        Fewer than two of these: names are no words of this tokenizer, and nothing can be asked.
    """
    asked, *others = villagers(draws, 7)
    needle, question = (tokenizer.encode(f" {text}") for text in (KEY.format(**asked), asked["name"]))
    said, room = [], context - len(needle) - len(question)
    while len(more := tokenizer.encode(" " * bool(said) + sentence(draws, others))) <= room:
        said.append(more)
        room -= len(more)
    said.insert(round(depth * len(said)), needle)
    places = (f" {place}" for place in (asked["place"], *draws.permutation(PLACES)))
    return [*sum(said, []), *question], [*dict.fromkeys(tokenizer.encode(place)[0] for place in places)][:choices]
