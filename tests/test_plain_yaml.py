"""Whatever a params file holds, it is plain data or one sentence; nothing in it costs more than its own length."""

import pytest

from upsnb import config as configs
from upsnb import overlays, plain_yaml
from upsnb.errors import ConfigError


def aliases(line: str, count: int) -> str:
    """`line` for 0, 1, 2, ..., with {n} and {before} in it."""
    return "\n".join(line.format(n=f"x{n}", before=f"x{n - 1}") for n in range(1, count))


REFUSED = {  # what it is called: (the file, what is said of it)
    "UTF-16": ("a: 1".encode("utf-16"), "not UTF-8 (byte 0xff at 0)"),
    "Latin-1": ("a: é".encode("latin-1"), "not UTF-8"),
    "a key twice": ("seed: 1\nseed: 2", "'seed' is there twice -> correct line 2"),
    "a key twice below": ("training:\n  amp: true\n  seed: 1\n  amp: false", "'amp' is there twice -> correct line 4"),
    "a bomb of aliases": (
        "x0: &x0 [1]\n" + aliases("{n}: &{n} [" + "*{before}, " * 9 + "]", 30),
        "aliases are written",
    ),
    "a chain of aliases": ("x0: &x0 [1]\n" + aliases("{n}: &{n} [*{before}]", 900), "20 levels"),
    "an alias of itself": ("a: &a [*a]", "inside of what it stands for"),
    "a merge of itself": ("a: &a {<<: *a}", "inside of what it stands for"),
    "deep lists": ("[" * 30000, "more than 20 levels"),
    "deep blocks": ("- " * 30000, "more than 20 levels"),
    "deep keys": ("? " * 30000, "more than 20 levels"),
    "many keys": ("".join(f"k{n}: 1\n" for n in range(5000)), "more than 2000 values"),
    "more keys": ("".join(f"k{n}: 1\n" for n in range(20000)), "longer than 65536 bytes"),
    "a long text": ("a" * 10**6, "longer than 65536 bytes"),
    "a long number": ("seed: " + "9" * 6000, "digits"),
    "a long number in sixties": ("seed: 1" + ":1" * 30000 + ".5", "not what it seems"),
    "a long hexadecimal number": ("seed: 0x" + "f" * 60000, "digits"),
    "a tag that runs code": (
        "seed: !!python/object/apply:os.getcwd []",
        "!!python/object/apply:os.getcwd makes no plain",
    ),
    "a wrong tag": ("seed: !!int abc", "not what it seems"),
    "a date by tag": ("seed: !!timestamp x", "!!timestamp makes no plain data"),
    "a date that is none": ("seed: 2024-13-45", "training.seed: got the text '2024-13-45'"),
    "the year 0": ("amp: 0000-01-01", "training.amp: got the text '0000-01-01'"),
    "infinity": ("lr: .inf", "optimizer.lr: got inf"),
    "no number": ("lr: .nan", "optimizer.lr: got nan"),
    "too large a number": ("lr: 1.0e+400", "optimizer.lr: got inf"),
    "two documents": ("seed: 1\n---\nseed: 2", "another document"),
    "a null character": ("a: \0", "special characters"),
    "half a character": (r'data: {root: "\ud800"}', "surrogates not allowed"),
    "a list for a key": ("[a]: 1", "a key that is no text"),
    "a key of two lines": (r'"a\nb": 1', r"'a\nb': unknown setting"),
    "a single value": ("3", "got int at the top"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_is_no_page_of_settings_is_told_in_one_sentence(tmp_path, what):
    content, said = REFUSED[what]
    path = tmp_path / "a.yaml"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ConfigError) as caught:
        overlays.load(path)
    head, problem = str(caught.value).split("\n  ")
    assert str(path) in head and said in problem and " -> " in problem and len(problem) < 400


def test_a_flood_of_problems_is_cut_and_counted(tmp_path):
    path = tmp_path / "a.yaml"
    path.write_text("".join(f"unknown_{n}: 1\n" for n in range(1500)))
    with pytest.raises(ConfigError) as caught:
        overlays.load(path)
    said = str(caught.value)
    assert said.startswith("1500 problems") and said.endswith("and 1480 more") and said.count("\n") == 21


def test_a_mark_of_byte_order_and_aliases_of_what_is_short_are_read(tmp_path):
    path = tmp_path / "a.yaml"
    path.write_text("a: &a {amp: true}\ntraining: {<<: *a, seed: 3}", encoding="utf-8-sig")
    assert plain_yaml.mapping(path.read_bytes(), "")["training"] == {"amp": True, "seed": 3}


def test_a_saved_config_that_is_none_is_refused():
    for text in ("- 1", "3", "[", ""):
        with pytest.raises(ConfigError, match="here"):
            configs.parse(text, "here")
