"""Where the small real PDEBench files are."""

from pathlib import Path

import pytest
from real_files import REAL_FILES, SMALL_FILES


@pytest.fixture
def shared_data() -> Path:
    """Folder of small real PDEBench files beside the repository; not part of it."""
    if not SMALL_FILES.is_dir():
        pytest.skip("needs the small PDEBench files in ../shared/data/pdebench-small, beside the repository")
    return SMALL_FILES


@pytest.fixture(params=REAL_FILES)
def real_file(request, shared_data) -> tuple[str, Path]:
    """A family's name, and its small real file."""
    return request.param, shared_data / REAL_FILES[request.param]
