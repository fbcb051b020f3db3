"""How many of the cases that are drawn by seed a test tries."""

import os


def share(full: int, least: int | None = None) -> range:
    """Seeds of the cases to try: those of ABUSE (20-39, 20-), as far as there are as many; else a tenth, or `least`."""
    first, _, last = os.environ.get("ABUSE", f"0-{(least or max(1, full // 10)) - 1}").partition("-")
    return range(int(first), min(int(last or full - 1) + 1, full))
