"""Small files of PDEBench's families, made with its own numerics; beside the repository and not part of it."""

from pathlib import Path

from eleven import FILES as REAL_FILES  # noqa: F401  (in benchmarks/)

SMALL_FILES = Path(__file__).resolve().parents[2] / "shared" / "data" / "pdebench-small"
