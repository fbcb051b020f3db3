"""Waiting for what others do in their own time; no test says how long that may take. `Run.wait_for` waits for runs."""

import time

LONGEST_S = 600.0  # against hangs alone: many times what anything here takes on a slow and busy machine


def until(condition, problem: str = "it never happened", every_s: float = 0.02):
    """The first true value of a condition, which is looked at so often."""
    deadline = time.monotonic() + LONGEST_S
    while not (value := condition()):
        assert time.monotonic() < deadline, problem
        time.sleep(every_s)
    return value
