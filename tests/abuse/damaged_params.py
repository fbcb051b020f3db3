"""Params files that are wrong as people and disks make them wrong, each a function of its seed."""

import random
from pathlib import Path

import yaml

PARAMS = sorted((Path(__file__).resolve().parents[2] / "params").rglob("*.yaml"))
VALUES = [  # in the place of any other, as YAML writes them
    *(".inf", "-.inf", ".nan", "1.0e+400", "1e400", "1e-4", "-1", "0", "9" * 400, "0x" + "f" * 9000, "1:1:1:1", "3.0"),
    *("2024-13-45", "0000-01-01", "!!timestamp x", "!!binary x", "!!python/object/apply:os.getcwd []", "!!int abc"),
    *("null", "~", "yes", "'8'", '"a\\nb"', '"\\0"', '"\\ud800"', "../../x", "a/b", "''", "x" * 2000, "é\u2028ü"),
    *("[]", "{}", "[[[[]]]]", "[" * 40 + "]" * 40, "{a: {b: {c: 1}}}", "*gone", "&a [*a]", "2147483648", "1.0e+300"),
    *("9223372036854775808", "{? [a] : b}", "{a.b: {family: darcy2d}}", "{train: {family: darcy2d}}", "|\n  text"),
]
LINES = [  # put in somewhere
    *("\tseed: 1", "seed: 1\nseed: 2", "unknown: 1", "- 1", "---", "...", "%YAML 3.0", "{", "]", ": :", "? a", "<<: 3"),
    *("x: &x [1, 1, 1, 1, 1]\ny: &y [*x, *x, *x, *x, *x]\nz: &z [*y, *y, *y, *y, *y]\nw: [*z, *z, *z, *z, *z, *z]",),
    *("\n".join(f"k{n}: 1" for n in range(count)) for count in (30, 3000, 20000)),
    *("a: " + "[" * 5000, "? " * 3000, "training: {seed: 3}", "preset: quick", 'data: {datasets: {"a\\nb": {}}}'),
]


def damage(seed: int) -> bytes:
    """The bytes of one file; a few are still right."""
    draw = random.Random(seed)
    text = draw.choice(PARAMS).read_text()
    for _ in range(draw.choice([1, 1, 2, 3])):
        text = draw.choice([_value, _value, _key, _line, _line, _indent, _cut, _characters, _elsewhere])(text, draw)
    content = text.encode("utf-8", "surrogatepass")
    return draw.choice([*[_same] * 8, _bytes, _utf16, _latin, _long])(content, draw)


def _lines_with(text: str, what: str) -> list[int]:
    return [n for n, line in enumerate(text.split("\n")) if what in line.partition("#")[0]] or [0]


def _value(text, draw):
    lines = text.split("\n")
    at = draw.choice(_lines_with(text, ": "))
    key, _, _ = lines[at].partition(": ")
    lines[at] = f"{key}: {draw.choice(VALUES)}"
    return "\n".join(lines)


def _key(text, draw):
    lines = text.split("\n")
    at = draw.choice(_lines_with(text, ":"))
    key, colon, rest = lines[at].partition(":")
    place = draw.randrange(len(key) + 1)
    changed = draw.choice([key[:place] + key[place + 1 :], key[:place] + draw.choice("xé_. \n") + key[place:], key * 2])
    lines[at] = changed + colon + rest
    return "\n".join(lines)


def _line(text, draw):
    lines = text.split("\n")
    lines.insert(draw.randrange(len(lines) + 1), draw.choice(LINES))
    return "\n".join(lines)


def _indent(text, draw):
    lines = text.split("\n")
    at = draw.randrange(len(lines))
    lines[at] = draw.choice([" " + lines[at], lines[at].lstrip(), "\t" + lines[at].lstrip(), lines[at] + "\r", ""])
    return "\n".join(lines)


def _cut(text, draw):
    return text[: draw.randrange(len(text) + 1)]


def _characters(text, draw):
    for _ in range(draw.choice([1, 5])):
        at = draw.randrange(len(text) + 1)
        text = (
            text[:at] + draw.choice("\0\x07\x1b{}[]:,&*!|>'\"%@`#-?\u2028\ufeff\ud800") + text[at + draw.randrange(2) :]
        )
    return text


def _elsewhere(text, draw):
    """A section where another one belongs."""
    values = yaml.safe_load(draw.choice(PARAMS).read_text())
    name, target = draw.choice(list(values)), draw.choice(["training", "operator", "data", "latent", "zebra"])
    return yaml.safe_dump({target: values[name]}) + draw.choice(["", text])


def _same(content, draw):
    return content


def _bytes(content, draw):
    changed = bytearray(content or b" ")
    for _ in range(draw.choice([1, 4, 30])):
        changed[draw.randrange(len(changed))] = draw.randrange(256)
    return bytes(changed)


def _utf16(content, draw):
    return content.decode("utf-8", "replace").encode("utf-16")


def _latin(content, draw):
    return content + "# é\n".encode("latin-1")


def _long(content, draw):
    return content * 60
