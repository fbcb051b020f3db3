"""Where the small real PDEBench files are."""

from pathlib import Path

import pytest

SMALL_FILES = Path(__file__).resolve().parents[3] / "shared" / "data" / "pdebench-small"


@pytest.fixture
def shared_data() -> Path:
    """Folder of small real PDEBench files beside the repository; not part of it."""
    if not SMALL_FILES.is_dir():
        pytest.skip("needs the small PDEBench files in ../shared/data/pdebench-small, beside the repository")
    return SMALL_FILES
