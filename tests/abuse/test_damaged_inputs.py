"""Whatever a file holds, reading it ends soon, in data or in one sentence with a remedy: no traceback, crash or hang.

A tenth of each corpus by default, all of it in `make abuse`.
"""

import collections
import json
import subprocess
import sys
from pathlib import Path

import damaged_checkpoints
import damaged_hdf5
import damaged_params
import pytest
from share import share
from waiting import LONGEST_S

pytestmark = pytest.mark.slow  # processes of their own

READ = Path(__file__).with_name("read_damaged.py")
MOST_USED_S = 5.0  # of a processor, however many others wait for it
LONGEST_MESSAGE = 10_000  # characters


def read_all(kind: str, paths: list[Path]) -> None:
    """Have all of them read in a process of its own and check what came of each."""
    if not paths:
        pytest.skip("there are fewer than the seeds asked for")
    done = subprocess.run(
        [sys.executable, READ, kind],
        input="\n".join(map(str, paths)),
        cwd=paths[0].parent,
        capture_output=True,
        text=True,
        timeout=LONGEST_S,
    )
    results = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(results) == len(paths), f"{paths[len(results)]}: exit {done.returncode}\n{done.stderr[-2000:]}"
    counts = collections.Counter(result["outcome"] for result in results)
    slowest = max(result["used_s"] for result in results)
    print(f"{kind}: {len(paths)} files, {dict(counts)}, slowest {slowest} s")
    wrong = [
        (path.name, result)
        for path, result in zip(paths, results)
        if result["outcome"] == "traceback"
        or result["used_s"] > MOST_USED_S
        or (result["outcome"] == "refused" and " -> " not in result["said"])
        or len(result["said"]) > LONGEST_MESSAGE
    ]
    assert not wrong, f"{len(wrong)} of {len(paths)}: " + "\n".join(map(str, wrong[:10]))
    assert counts["refused"] > counts["read"]


def test_damaged_params_files(tmp_path):
    paths = []
    for seed in share(500):
        paths.append(tmp_path / f"{seed}.yaml")
        paths[-1].write_bytes(damaged_params.damage(seed))
    read_all("params", paths)


def test_damaged_data_files(tmp_path):
    paths = []
    for seed in share(300):
        path = tmp_path / f"{seed}.h5"
        paths.append(path.with_suffix(f".{damaged_hdf5.damage(seed, path)}.h5"))
        path.rename(paths[-1])
    read_all("hdf5", paths)


@pytest.fixture
def run(tiny_config, train_here, tmp_path):
    """A run that trained to its end."""
    folder = tmp_path / "run"
    train_here(tiny_config(("darcy",), **{"training.ema_decay": 0.9}), folder)
    return folder


def test_damaged_checkpoints(run, tmp_path):
    paths = [tmp_path / str(seed) for seed in share(200)]
    for seed, path in zip(share(200), paths):
        damaged_checkpoints.damage(seed, run, path)
    read_all("checkpoints", paths)
    assert not list(tmp_path.rglob("executed")) and not Path("executed").exists()
