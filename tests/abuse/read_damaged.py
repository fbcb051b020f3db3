"""Reads damaged files one after the other, as a user's kernel would, and prints a line of JSON on each.

A process of its own, so that what crashes is not the test. Called as `read_damaged.py KIND`, names on standard input.
"""

import json
import resource
import sys
import time
import warnings
from pathlib import Path

from upsnb.errors import UpsError

MEMORY_BYTES = 4 * 2**30  # of addresses; a reader of small files needs no more


def reader(kind: str):
    if kind == "params":
        from upsnb import overlays

        return overlays.load
    if kind == "hdf5":
        from upsnb.data.source import open_source

        return lambda path: open_source(path.suffixes[0][1:], path).read_all()
    import torch

    from upsnb import config as configs
    from upsnb.runs import runfolder
    from upsnb.training import checkpoint
    from upsnb.training.parallel import Ranks
    from upsnb.training.setup import Setup
    from upsnb.training.trained import load_model
    from upsnb.worker.position import Position

    torch.set_num_threads(1)
    built = None

    def go_on(folder: Path) -> None:
        """Load the model, and continue the run as its worker does."""
        nonlocal built
        if built is None:
            built = Setup.build(configs.load(folder / runfolder.CONFIG), Path("/"), Ranks(), lambda message: None)
        refused = None
        try:
            load_model(folder)
        except UpsError as error:
            refused = error
        state = checkpoint.load(folder)
        with checkpoint.as_saved(folder):
            built.load_state_dict(state["setup"])
            Position.of(state["position"])
            configs.parse(state["config"])
        if refused is not None:
            raise refused

    return go_on


def main(kind: str) -> None:
    warnings.simplefilter("ignore")
    read = reader(kind)
    if kind != "checkpoints":  # torch takes more for itself
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    for line in sys.stdin:
        started, outcome, said = time.process_time(), "read", ""
        try:
            read(Path(line.rstrip("\n")))
        except UpsError as error:
            outcome, said = "refused", str(error)
        except BaseException as error:
            outcome, said = "traceback", f"{type(error).__name__}: {error}"[:300]
        used_s = round(time.process_time() - started, 3)
        print(json.dumps({"outcome": outcome, "said": said, "used_s": used_s}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
