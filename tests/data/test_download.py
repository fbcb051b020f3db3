"""Downloads end in a complete file with the right MD5, or in an error and no file; the network is a local server."""

import hashlib
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from upsnb.data import download as module
from upsnb.data.download import download
from upsnb.data.families import FAMILIES
from upsnb.data.published import PUBLISHED, RemoteFile
from upsnb.errors import DataError

CONTENT = b"not really HDF5" * 1000
NAME = "1D_Advection_Sols_beta0.4.hdf5"


@pytest.fixture
def served(monkeypatch):
    """Point the module at a local server; returns the list of paths asked for."""
    asked = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            asked.append(self.path)
            self.send_response(200 if self.path == "/7" else 404)
            self.end_headers()
            self.wfile.write(CONTENT)

        def log_message(self, *args):
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setattr(module, "URL", f"http://127.0.0.1:{server.server_port}/{{id}}")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    _list(monkeypatch)
    yield asked
    server.shutdown()
    server.server_close()


def _list(monkeypatch, id=7, content=CONTENT, size_gib=0.0):
    md5 = hashlib.md5(content, usedforsecurity=False).hexdigest()
    monkeypatch.setitem(PUBLISHED, "advection1d", [RemoteFile(NAME, id, md5, size_gib)])


def test_the_table_is_well_formed():
    files = [file for files in PUBLISHED.values() for file in files]
    assert PUBLISHED.keys() <= FAMILIES.keys()
    assert len({file.id for file in files}) == len({file.md5 for file in files}) == len(files) > 50
    assert all(len(file.md5) == 32 and int(file.md5, 16) for file in files)


@pytest.mark.parametrize("which", [0.4, NAME])
def test_a_file_is_fetched_once_and_then_reused(served, tmp_path, which):
    path = download("advection1d", which, tmp_path / "new")
    assert path == tmp_path / "new" / NAME
    assert path.read_bytes() == CONTENT
    assert download("advection1d", which, tmp_path / "new") == path
    assert served == ["/7"]


def test_wrong_content_leaves_no_file(served, tmp_path, monkeypatch):
    _list(monkeypatch, content=b"what was published")
    with pytest.raises(DataError, match=rf"{NAME}: download from .* failed .*->"):
        download("advection1d", 0.4, tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_missing_page_leaves_no_file(served, tmp_path, monkeypatch):
    _list(monkeypatch, id=8)
    with pytest.raises(DataError, match="failed .*404"):
        download("advection1d", 0.4, tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_different_file_of_the_same_name_is_never_replaced(served, tmp_path):
    (tmp_path / NAME).write_bytes(b"generated")
    with pytest.raises(DataError, match="not the official file"):
        download("advection1d", 0.4, tmp_path)
    assert (tmp_path / NAME).read_bytes() == b"generated"
    assert not served


def test_too_little_disk_is_said_before_the_download(served, tmp_path, monkeypatch):
    _list(monkeypatch, size_gib=1e9)
    with pytest.raises(DataError, match="GiB are free"):
        download("advection1d", 0.4, tmp_path)
    assert not served


@pytest.mark.parametrize(
    ("family", "which"), [("heat1d", 0.4), ("darcy2d", 0.4), ("darcy2d", NAME), ("reacdiff1d", 0.5)]
)
def test_unknown_files_are_refused_with_the_known_ones(tmp_path, family, which):
    with pytest.raises(DataError, match="one of"):
        download(family, which, tmp_path)


def test_a_parameter_names_a_file_if_it_is_the_only_one(monkeypatch, tmp_path):
    (tmp_path / "1D_Burgers_Sols_Nu1.0.hdf5").touch()
    with pytest.raises(DataError, match=r"Nu1\.0\.hdf5: exists but is not"):
        download("burgers1d", 1.0, tmp_path)
