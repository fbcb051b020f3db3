"""Checkpoints that were changed behind the index's back or together with it, each a function of its seed."""

import io
import json
import os
import pickle
import random
import shutil
from pathlib import Path

import torch

from upsnb.runs import checkpoint_index

VALUES = [
    None,
    0,
    -1,
    3,
    1.5,
    float("nan"),
    "x",
    "",
    [],
    {},
    [1],
    {"a": 1},
    True,
    2**31,
    10**30,
    {"$float": "x"},
    "a/b",
]


class Code:
    """Its unpickling would leave a file."""

    def __reduce__(self):
        return os.system, ("touch executed",)


def damage(seed: int, run: Path, folder: Path) -> None:
    """A copy of a run whose latest checkpoint is damaged; in three of four the checksums are right again."""
    draw = random.Random(seed)
    shutil.copytree(run, folder)
    (path,) = (folder / "checkpoints").glob("step-*")
    change = draw.choice([_state, _state, _state, _contents, _contents, _contents, _shard, _shard, _file, _index])
    change(path, draw)
    if change not in (_file, _index) and draw.random() < 0.75:
        index = folder / "checkpoints" / checkpoint_index.INDEX
        values = json.loads(index.read_text())
        for name in values["checkpoints"][path.name]["files"]:
            values["checkpoints"][path.name]["files"][name] = checkpoint_index.digest(path / name)
        index.write_text(json.dumps(values))


def _inside(values, draw: random.Random) -> None:
    """Change one value or key somewhere in a nest."""
    places = []

    def walk(node):
        for key in list(node) if isinstance(node, dict) else range(len(node)) if isinstance(node, list) else ():
            places.append((node, key))
            walk(node[key])

    walk(values)
    node, key = draw.choice(places)
    how = draw.randrange(4) if isinstance(node, dict) else 3
    if how == 0:
        del node[key]
    elif how == 1:
        node[f"{key}x"] = node.pop(key)
    elif how == 2:
        node["more"] = draw.choice(VALUES)
    else:
        node[key] = draw.choice(VALUES)


def _state(path, draw):
    file = path / "state.json"
    text = file.read_text()
    values = json.loads(text)
    part = draw.choice([values, values["specs"], values["position"], values["setup"]["plateau"], "config", "text"])
    if part == "config":
        lines = values["config"].splitlines()
        lines[draw.randrange(len(lines))] = draw.choice(["", "x: 1", "  dim: 3", "[", "latent: 3", "model: {build: x}"])
        values["config"] = "\n".join(lines)
    elif part == "text":
        file.write_text(
            draw.choice(["", "[]", "[" * 10**5, text[: draw.randrange(len(text))], "\0", text.replace(":", "")])
        )
        return
    else:
        _inside(part, draw)
    file.write_text(json.dumps(values))


def _contents(path, draw):
    """The table of contents: not one, one that runs code, or one that lies."""
    file = path / ".metadata"
    if draw.random() < 0.3:
        files = [pickle.dumps(Code()), b"", pickle.dumps({"a": 1}), file.read_bytes()[:-9], b"\x80\x04]" + b"]" * 9999]
        file.write_bytes(draw.choice(files))
        return
    metadata = pickle.loads(file.read_bytes())
    name, entry = draw.choice(list(metadata.state_dict_metadata.items()))
    where, info = draw.choice(list(metadata.storage_data.items()))
    draw.choice(
        [
            lambda: metadata.state_dict_metadata.pop(name),
            lambda: metadata.state_dict_metadata.update({f"{name}x": metadata.state_dict_metadata.pop(name)}),
            lambda: setattr(entry, "size", torch.Size(draw.choice([[], [1], [10**12], [-1], [0], [*entry.size, 2]]))),
            lambda: setattr(entry, "chunks", []),
            lambda: setattr(entry.properties, "dtype", draw.choice([torch.float64, torch.int8, torch.complex64])),
            lambda: metadata.storage_data.pop(where),
            lambda: setattr(info, "relative_path", draw.choice(["../../x", "/dev/zero", "state.json"])),
            lambda: setattr(info, "offset", draw.choice([-1, 3, 10**12])),
            lambda: setattr(info, "length", draw.choice([-1, 0, 3, 10**12])),
            lambda: setattr(metadata, "planner_data", Code()),
        ]
    )()
    file.write_bytes(pickle.dumps(metadata))


def _shard(path, draw):
    (file,) = path.glob("*.distcp")
    content = bytearray(file.read_bytes())
    evil = io.BytesIO()
    torch.save({"weights": Code()}, evil)
    how = draw.randrange(4)
    if how == 0:
        content = content[: draw.randrange(len(content))]
    elif how == 1:
        content[: len(evil.getvalue())] = evil.getvalue()
    elif how == 2:
        content = bytearray(pickle.dumps(Code())) + content
    else:
        for _ in range(draw.choice([1, 20, 500])):
            content[draw.randrange(len(content))] = draw.randrange(256)
    file.write_bytes(content)


def _file(path, draw):
    file = draw.choice(sorted(path.iterdir()))
    file.unlink()
    if draw.random() < 0.5:
        draw.choice([file.mkdir, file.touch, lambda: file.symlink_to("/dev/zero"), lambda: file.symlink_to(file)])()


def _index(path, draw):
    file = path.parent / checkpoint_index.INDEX
    values = json.loads(file.read_text())
    if draw.random() < 0.3:
        file.write_text(draw.choice(["", "[]", "{}", "3", "[" * 10**5, file.read_text()[:-20], '{"format": 2}']))
        return
    _inside(values, draw)
    file.write_text(json.dumps(values))
