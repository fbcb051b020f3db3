"""Small pictures of coloured shapes and what they show in words, drawn here: the same for the same seed.

A scene is drawn at random first and then described, so a caption is true by construction. There are two kinds: so many
of one shape and colour, and two of different colours with a relation between them.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import numpy as np

from upsnb.errors import DataError

COLOURS = {"red": (0.9, 0.15, 0.15), "green": (0.15, 0.75, 0.2), "blue": (0.2, 0.35, 0.95), "yellow": (0.95, 0.85, 0.1)}
SHAPES = ("circle", "square", "triangle")
NUMBERS = ("a", "two", "three", "four")
NO_WORD, NO_CAPTION = "", "<none>"  # what fills a caption up, and what stands for all of it where it is left out
WORDS = (NO_WORD, NO_CAPTION, *NUMBERS, *COLOURS, *SHAPES, *(f"{shape}s" for shape in SHAPES))
WORDS += ("left", "right", "above", "below", "of")
LENGTH = 8  # words of the longest caption, "a red circle left of a blue square"
CELL = 10  # pixels of a side of the cells that hold one thing each, so that no two touch
RADIUS = (3.0, 4.0)  # half the width and height of a thing [pixels]
BACKGROUND = (0.05, 0.35)  # grey levels
CLEAR = 4.0  # pixels by which things are farther apart along the axis of their relation than along the other


@dataclass(frozen=True)
class Thing:
    """One shape of a scene; a colour or shape that a reader could not tell is empty."""

    shape: str
    colour: str
    x: float  # centre of the box around it, pixels from the left
    y: float  # pixels from the top
    radius: float


def relation(first: Thing, second: Thing) -> str:
    """Where the first stands, seen from the second: along the axis on which they are farther apart."""
    dx, dy = first.x - second.x, first.y - second.y
    if abs(dx) > abs(dy):
        return "left of" if dx < 0 else "right of"
    return "above" if dy < 0 else "below"


def describe(things: tuple[Thing, ...]) -> str:
    """The caption of a scene as `draw_scene` makes it."""
    first, last = things[0], things[-1]
    if first.colour != last.colour:
        return f"a {first.colour} {first.shape} {relation(first, last)} a {last.colour} {last.shape}"
    return f"{NUMBERS[len(things) - 1]} {first.colour} {first.shape}{'s' * (len(things) > 1)}"


def draw_scene(rng: np.random.Generator, size: tuple[int, int]) -> tuple[Thing, ...]:
    """A scene for a picture of (height, width) pixels."""
    rows, columns = (side // CELL for side in size)
    sides = [side / count for side, count in zip(size, (rows, columns))]
    cells = list(itertools.product(range(rows), range(columns)))
    if related := rng.random() < 0.5:
        looks = list(zip(rng.choice(SHAPES, 2), rng.choice(list(COLOURS), 2, replace=False)))
    else:
        looks = [(rng.choice(SHAPES), rng.choice(list(COLOURS)))] * int(rng.integers(1, len(NUMBERS) + 1))
    while True:
        chosen = rng.permutation(len(cells))[: len(looks)]
        things = []
        for (shape, colour), cell in zip(looks, chosen):
            radius = rng.uniform(*RADIUS)
            room = [side / 2 - radius - 1 for side in sides]  # a pixel of background on each side
            y, x = ((place + 0.5) * side + rng.uniform(-1, 1) * r for place, side, r in zip(cells[cell], sides, room))
            things.append(Thing(str(shape), str(colour), x, y, radius))
        first, last = things[0], things[-1]
        if not related or abs(abs(first.x - last.x) - abs(first.y - last.y)) >= CLEAR:
            return tuple(things)


def coverage(shape: str, x: float, y: float, radius: float, size: tuple[int, int]) -> np.ndarray:
    """How much of each pixel a shape covers, (height, width) float64 in [0, 1]; its border is one pixel soft."""
    dy, dx = np.mgrid[: size[0], : size[1]] + 0.5 - np.array([y, x]).reshape(2, 1, 1)
    if shape == "circle":
        outside = np.hypot(dx, dy) - radius
    elif shape == "square":
        outside = np.maximum(abs(dx), abs(dy)) - radius
    else:  # an upright triangle as wide as high
        outside = np.maximum(dy - radius, (2 * abs(dx) - dy - radius) / math.sqrt(5))
    return np.clip(0.5 - outside, 0, 1)


def render(things: tuple[Thing, ...], background: float, size: tuple[int, int]) -> np.ndarray:
    """A scene as a picture, (3, height, width) float64 in [0, 1]."""
    picture = np.full((3, *size), background)
    for thing in things:
        mask = coverage(thing.shape, thing.x, thing.y, thing.radius, size)
        picture += mask * (np.array(COLOURS[thing.colour]).reshape(3, 1, 1) - picture)
    return picture


def encode(caption: str) -> list[int]:
    """Token ids of a caption, filled up to LENGTH.

    Raises:
        DataError: it has other words than the pictures are told in, or more.
    """
    words = caption.split()
    if unknown := [word for word in words if word not in WORDS]:
        raise DataError(f"{caption!r}: {', '.join(unknown)} is no word of {', '.join(WORDS[2:])} -> use those")
    if len(words) > LENGTH:
        raise DataError(f"{caption!r} has {len(words)} words, and captions have at most {LENGTH} -> say less")
    return [WORDS.index(word) for word in words] + [0] * (LENGTH - len(words))


def decode(tokens) -> str:
    """The words of token ids."""
    return " ".join(WORDS[token] for token in tokens if token)


def generate(count: int, size: tuple[int, int], seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Pictures and their captions.

    Returns:
        (count, 3, height, width) uint8 and token ids (count, LENGTH) int64.
    """
    rng = np.random.default_rng((seed, *size))
    pictures, captions = np.empty((count, 3, *size), np.uint8), np.empty((count, LENGTH), np.int64)
    for picture, caption in zip(pictures, captions):
        things = draw_scene(rng, size)
        picture[:] = np.round(255 * render(things, rng.uniform(*BACKGROUND), size))
        caption[:] = encode(describe(things))
    return pictures, captions
