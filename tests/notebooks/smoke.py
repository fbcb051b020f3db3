"""pytest plugin: nbval runs every notebook with params/smoke.yaml instead of its own preset.

`PYTHONPATH=tests/notebooks python -m pytest -p smoke --nbval-lax ... notebooks/01_train.ipynb`

The notebooks stay as their readers see them. Their presets train for minutes, which a test need not; what they show
and assert is the same. In place, not on a copy: paths, kernel folder and kept outputs are then those of the notebook.
"""

import pytest

PRESET = "smoke"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the smoke preset below the parameters, as papermill would."""
    for item in items:
        cell = getattr(item, "cell", None)
        if cell is not None and "parameters" in cell.metadata.get("tags", ()):
            cell.source += f'\npreset = "{PRESET}"'
