"""Samples that several processes solve are those that one solves, and no process outlives who asked."""

import os
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from waiting import until

from upsnb.data.families import FAMILIES
from upsnb.data.generate import generate
from upsnb.data.source import open_source
from upsnb.errors import DataError
from upsnb.runs.processes import process_identity
from upsnb.solvers import processes
from upsnb.solvers.waves import solve_advection

REST = ({"beta": 0.4}, 32, np.linspace(0, 2, 5))


def _fails(seed, samples, parameters, resolution, times):
    for sample in samples:
        if sample == 3:
            raise DataError(f"no flow in sample {sample} -> take a finer grid")
        yield {"u": np.full(4, float(sample))}


def _dies(seed, samples, parameters, resolution, times):
    for sample in samples:
        if sample == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        yield {"u": np.full(4, float(sample))}


def _told(seed, samples, parameters, resolution, times):
    """Which process solved it, after more bytes than a pipe holds."""
    for sample in samples:
        yield {"pid": os.getpid(), "u": np.zeros(10**6), "sample": sample}


@pytest.mark.parametrize("samples", [range(7), [0, 1, 4, 5, 9], [3]], ids=str)
@pytest.mark.parametrize("shares", [2, 5])
def test_every_sample_comes_once_and_is_what_one_process_makes_of_it(samples, shares):
    alone = dict(processes.solve(solve_advection, 5, samples, REST, 1))
    shared = list(processes.solve(solve_advection, 5, samples, REST, shares))
    assert sorted(sample for sample, _ in shared) == sorted(alone) == list(samples)
    for sample, fields in shared:
        np.testing.assert_array_equal(fields["u"], alone[sample]["u"])


def test_solvers_see_ranges_alone():
    seen = []

    def solve(seed, samples, *_):
        seen.append(samples)
        return ({} for _ in samples)

    assert [sample for sample, _ in processes.solve(solve, 0, np.array([2, 3, 6, 8, 9]), (), 2)] == [2, 3, 6, 8, 9]
    assert seen == [range(2, 4), range(6, 7), range(8, 10)], "in this process: no other could import a local solver"


def test_a_share_is_another_processs_and_none_is_left_behind():
    told = [fields for _, fields in processes.solve(_told, 0, range(4), (0, 0, 0), 2)]
    pids = {fields["pid"] for fields in told}
    assert len(pids) == 2 and os.getpid() not in pids
    assert not any(map(process_identity, pids))


def test_no_process_outlives_a_caller_that_stops_half_way():
    solved = processes.solve(_told, 0, range(100), (0, 0, 0), 2)
    pid = next(solved)[1]["pid"]
    assert process_identity(pid)
    solved.close()
    assert not process_identity(pid)


def test_a_solvers_error_is_the_callers():
    with pytest.raises(DataError, match=r"no flow in sample 3 -> take a finer grid$"):
        list(processes.solve(_fails, 0, range(6), (0, 0, 0), 2))


def test_a_process_that_is_killed_is_a_sentence():
    with pytest.raises(DataError, match=r"sample 3: the process that solved it ended \(code -9\) -> free memory"):
        list(processes.solve(_dies, 0, range(3, 6), (0, 0, 0), 2))


SCRIPT = """
import os, signal, sys
from upsnb.solvers import processes
from upsnb.solvers.processes import solve
sys.path.append({here!r})
from test_processes import _told
for number, (sample, fields) in enumerate(solve(_told, 0, range(100), (0, 0, 0), 2)):
    print(fields["pid"], flush=True)
    if number == 3:
        os.kill(os.getpid(), signal.SIGKILL)
"""


def test_no_process_outlives_a_caller_that_is_killed(tmp_path):
    script = tmp_path / "script.py"  # that has no `if __name__ == "__main__"` either
    script.write_text(SCRIPT.format(here=str(Path(__file__).parent)))
    path = os.pathsep.join(filter(None, sys.path))
    done = subprocess.run(
        [sys.executable, script], stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": path}
    )
    pids = set(map(int, done.stdout.split()))
    assert done.returncode == -signal.SIGKILL and pids
    until(lambda: not any(map(process_identity, pids)), "some are still there")


# --- files ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["cfd1d", "diffreact2d", "incompressible2d"])  # one for each layout
@pytest.mark.parametrize(("first", "then"), [(2, 1), (1, 3), (3, 2)])
def test_what_several_processes_began_any_number_goes_on_with(tmp_path, name, first, then):
    make = partial(generate, FAMILIES[name], num_samples=9, resolution=8, num_times=3)
    seen = []

    def stop(done, of):
        if done == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        make(tmp_path / "a.h5", progress=stop, processes=first)
    make(tmp_path / "a.h5", progress=lambda *told: seen.append(told), processes=then)
    assert seen == [(done, 9) for done in range(6, 10)]
    ours, alone = (open_source(name, path) for path in (tmp_path / "a.h5", make(tmp_path / "b.h5")))
    assert [file.name for file in tmp_path.iterdir() if file.suffix != ".h5"] == []
    np.testing.assert_allclose(ours.read_all()[0], alone.read_all()[0], rtol=1e-5, atol=1e-6)
