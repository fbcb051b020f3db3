"""Samples solved by several processes: solvers are NumPy on one core, and samples know nothing of each other.

The processes are plain ones that import a solver and nothing else, so that a script, a notebook or a rank can start
them, whatever its main module does. They answer through a pipe: who asked and has gone is noticed at the next sample.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, suppress
from itertools import chain
from multiprocessing.connection import Connection, Pipe, wait

import numpy as np

from upsnb.errors import DataError
from upsnb.malloc import MALLOC
from upsnb.solvers.waves import Sample


def solve(solver: Callable, seed: int, samples: Sequence[int], rest: tuple, processes: int) -> Iterator[tuple]:
    """What `solver(seed, range, *rest)` yields for these samples, each with its number; in any order.

    Args:
        samples: numbers in increasing order.
        processes: how many share them. This one does it alone if 1, or if another could not import the solver.

    Raises:
        DataError: the solver's, or a process that ended before its samples were solved.
    """
    if processes == 1 or not _importable(solver):
        yield from _solved(solver, seed, samples, rest)
        return
    shares = [share.tolist() for share in np.array_split(np.asarray(samples), processes)]
    helpers = {}
    try:
        for share in filter(None, shares):
            connection, process = _start()
            helpers[connection] = process, set(share)
            with suppress(OSError):  # it has ended: noticed below
                connection.send((solver, seed, share, rest))
        while helpers:
            for connection in wait(list(helpers)):
                process, left = helpers[connection]
                try:
                    sample, fields = connection.recv()
                except (EOFError, OSError):
                    if left:
                        raise DataError(
                            f"sample {min(left)}: the process that solved it ended (code {process.wait()}) -> "
                            "free memory, or make fewer samples or a smaller grid"
                        ) from None
                    del helpers[connection]
                    connection.close()
                    process.wait()
                    continue
                if isinstance(fields, Exception):
                    raise fields
                left.remove(sample)
                yield sample, fields
    finally:
        for connection, (process, _) in helpers.items():
            process.kill()
            connection.close()
            process.wait()


def _importable(solver: Callable) -> bool:
    """Whether another process can have it: not what a notebook, a script or another function defines."""
    try:
        return b"__main__" not in pickle.dumps(solver)
    except (pickle.PicklingError, AttributeError, TypeError):
        return False


def _start() -> tuple[Connection, subprocess.Popen]:
    """A process that waits for what to solve."""
    ours, theirs = Pipe()
    one_thread = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    path = os.pathsep.join(filter(None, sys.path))  # what can be imported here can be there
    with closing(theirs):
        process = subprocess.Popen(
            [sys.executable, "-m", __name__, str(theirs.fileno())],
            stdin=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
            env={**MALLOC, **os.environ, **one_thread, "PYTHONPATH": path},
            start_new_session=True,  # an interrupt is for who asked, who ends this one
        )
    return ours, process


def _solved(solver: Callable, seed: int, samples: Sequence[int], rest: tuple) -> Iterator[tuple[int, Sample]]:
    """Numbered samples of one process: solvers take ranges, and what an interrupted call has left may be several."""
    gaps = np.flatnonzero(np.diff(samples) != 1) + 1
    runs = [range(run[0], run[-1] + 1) for run in np.split(np.asarray(samples), gaps) if len(run)]
    return chain.from_iterable(zip(run, solver(seed, run, *rest), strict=True) for run in runs)


def _main(descriptor: int) -> None:
    """Solve what one message asks for, and send each sample back; an error in place of one is the end."""
    with Connection(descriptor) as connection, suppress(ConnectionError):  # nobody waits any more
        try:
            for numbered in _solved(*connection.recv()):
                connection.send(numbered)
        except Exception as error:
            connection.send((None, error))


if __name__ == "__main__":
    _main(int(sys.argv[1]))
