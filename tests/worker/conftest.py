"""Losses that a test spoils."""

import pytest
from guarded import change_losses


@pytest.fixture
def spoil(monkeypatch):
    """`spoil(what)`: let `what(call number, total loss)` replace or refuse every loss, from 1 on."""

    def install(what):
        calls = []

        def change(batch, total):
            calls.append(len(batch.inputs))
            return what(len(calls), total)

        change_losses(monkeypatch, change)
        return calls

    return install
