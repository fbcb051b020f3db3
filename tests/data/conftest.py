"""Small real PDEBench files, one after the other."""

from pathlib import Path

import pytest
from real_files import REAL_FILES


@pytest.fixture(params=REAL_FILES)
def real_file(request, shared_data) -> tuple[str, Path]:
    """A family's name, and its small real file."""
    return request.param, shared_data / REAL_FILES[request.param]
