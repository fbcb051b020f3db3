"""The campaign can be run in pieces: together they are all of it, and no piece is another's."""

from share import share


def test_pieces_are_disjoint_and_together_all(monkeypatch):
    monkeypatch.delenv("ABUSE", raising=False)
    assert (list(share(100)), list(share(5)), list(share(100, least=2))) == ([*range(10)], [0], [0, 1])
    found = []
    for asked in ("0-39", "40-40", "41-", "120-130"):
        monkeypatch.setenv("ABUSE", asked)
        found += share(100)
    assert found == [*range(100)]
