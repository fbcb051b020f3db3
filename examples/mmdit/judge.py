"""Reads a scene out of a picture, without its caption, and says what of a caption is there.

Nothing is learned: what is coloured is cut into connected parts, a part's colour is the mean of its pixels, its shape
the one whose drawing comes closest.
"""

from __future__ import annotations

import math

import numpy as np
from scipy import ndimage

from examples.mmdit.data import COLOURS, NUMBERS, SHAPES, Thing, coverage, relation
from upsnb.errors import DataError

COLOURED = 0.3  # highest minus lowest channel of a pixel that belongs to a thing
SMALLEST = 10  # pixels of a part that is no speck
NEAR = 0.35  # largest distance from the colour that is named, in RGB
OVERLAP = 0.7  # least share that both cover of what a part or its shape covers
AREAS = {"circle": math.pi, "square": 4.0, "triangle": 2.0}  # of a shape of radius 1
ATTRIBUTES = ("colour", "count", "shape", "relation")


def read(picture: np.ndarray) -> tuple[Thing, ...]:
    """What is in a picture, (3, height, width) in [0, 1]."""
    smooth = ndimage.median_filter(picture, size=(1, 3, 3))  # what is noise in single pixels makes no parts
    labels, count = ndimage.label(np.ptp(smooth, axis=0) > COLOURED)
    if not (labels == 0).any():
        return ()
    ground = np.median(picture[:, labels == 0], axis=1)
    parts = (labels == number for number in range(1, count + 1))
    return tuple(_look(picture, part, ground) for part in parts if part.sum() >= SMALLEST)


def _look(picture: np.ndarray, part: np.ndarray, ground: np.ndarray) -> Thing:
    """What a connected part of a picture is, (height, width) bool, on a ground of this colour, (3,)."""
    mean = picture[:, part].mean(axis=1)
    apart = {name: np.linalg.norm(mean - colour) for name, colour in COLOURS.items()}
    colour = min(apart, key=apart.get)
    # how much of each pixel is covered, corners included, which the median has rounded off
    across = COLOURS[colour] - ground
    covered = np.tensordot(across, picture - ground.reshape(3, 1, 1), 1) / (across @ across)
    covered = np.clip(covered, 0, 1) * ndimage.binary_dilation(part, iterations=2)
    area = covered.sum()
    y, x = (float((axis * covered).sum() / area) + 0.5 for axis in np.indices(part.shape))
    found = []
    for shape in SHAPES:
        radius = math.sqrt(area / AREAS[shape])
        middle = y - radius / 3 if shape == "triangle" else y  # a third of its height is below its centre of mass
        drawn = coverage(shape, x, middle, radius, part.shape)
        found.append((np.minimum(drawn, covered).sum() / np.maximum(drawn, covered).sum(), shape, middle, radius))
    overlap, shape, y, radius = max(found)
    return Thing(shape if overlap >= OVERLAP else "", colour if apart[colour] <= NEAR else "", x, y, radius)


def verdict(caption: str, picture: np.ndarray) -> dict[str, bool]:
    """Which attributes of a caption its picture has: those of ATTRIBUTES that the caption speaks of.

    Colours and shapes are right where the picture shows them all and no other; of two colours each has its own shape.

    Raises:
        DataError: the caption is of neither kind that pictures are told in.
    """
    words, things = caption.split(), read(picture)
    colours = [word for word in words if word in COLOURS]
    shapes = [word.removesuffix("s") for word in words if word.removesuffix("s") in SHAPES]
    if len(colours) not in (1, 2) or words[0] not in NUMBERS:
        remedy = "say it like `two red circles` or `a red circle left of a blue square`"
        raise DataError(f"{caption!r} cannot be judged -> {remedy}")
    if len(colours) == 1:
        return {
            "colour": {thing.colour for thing in things} == set(colours),
            "count": len(things) == NUMBERS.index(words[0]) + 1,
            "shape": {thing.shape for thing in things} == set(shapes),
        }
    first, last = ([thing for thing in things if thing.colour == colour] for colour in colours)
    return {
        "colour": {thing.colour for thing in things} == set(colours),
        "count": len(things) == len(colours),
        "shape": {(thing.colour, thing.shape) for thing in things} == set(zip(colours, shapes)),
        "relation": len(first) == len(last) == 1 and relation(first[0], last[0]) == " ".join(words[3:-3]),
    }
