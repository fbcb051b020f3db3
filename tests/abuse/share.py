"""How many of the cases that are drawn by seed a test tries."""

import os


def share(full: int, least: int | None = None) -> range:
    """Seeds of the cases to try: all of `full` in `make abuse` (ABUSE=1), else the first tenth of them, or `least`."""
    return range(full if os.environ.get("ABUSE") == "1" else least or max(1, full // 10))
