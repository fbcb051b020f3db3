"""Downloads end in a complete file with the right MD5, or in an error and no file; the network is a local server."""

import hashlib
import re
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import h5py
import numpy as np
import pytest
from waiting import LONGEST_S

from upsnb import __main__ as command
from upsnb.data import download, generate, source
from upsnb.data.families import FAMILIES
from upsnb.data.published import PUBLISHED, RemoteFile
from upsnb.errors import DataError

NAME = "1D_Advection_Sols_beta0.4.hdf5"
ID = 7


@dataclass
class Server:
    """What is served, how badly, and what was asked for."""

    content: bytes
    ranges: bool = True
    says_length: bool = True
    says_range: str = "bytes */{}"  # of what lies beyond the end
    breaks_after: list[int] = field(default_factory=list)  # bytes of the next answers, after which they break
    asked: list[str] = field(default_factory=list)


@pytest.fixture(scope="module")
def content(tmp_path_factory):
    path = tmp_path_factory.mktemp("published") / NAME
    generate.generate(FAMILIES["advection1d"], path, 50, {"beta": 0.4}, resolution=64, num_times=13)
    return path.read_bytes()


@pytest.fixture
def server(monkeypatch, content):
    """One published advection file, on loopback; waiting takes no time."""
    state = Server(content)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            state.asked.append(self.headers.get("Range", ""))
            if self.path != f"/{ID}":
                return self.send_error(404)
            first, last = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers["Range"]).groups()
            start, stop = (int(first), int(last or len(state.content) - 1) + 1) if state.ranges else (0, None)
            body = state.content[start:stop]
            if state.ranges and not body:
                self.send_response(416)
                self.send_header("Content-Range", state.says_range.format(len(state.content)))
                self.end_headers()
                return None
            self.send_response(206 if state.ranges else 200)
            if state.ranges:
                self.send_header("Content-Range", f"bytes {start}-{start + len(body) - 1}/{len(state.content)}")
            if state.says_length:
                self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body[: state.breaks_after.pop(0)] if state.breaks_after else body)

        def log_message(self, *args):
            pass

    served = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=served.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
    monkeypatch.setattr(download, "URL", f"http://127.0.0.1:{served.server_port}/{{id}}")
    monkeypatch.setattr(download, "WAIT_S", 0.0)
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.setenv(name, "127.0.0.1")
    publish(monkeypatch, content)
    yield state
    served.shutdown()
    served.server_close()


def publish(monkeypatch, content, id=ID, size_gib=0.0):
    md5 = hashlib.md5(content, usedforsecurity=False).hexdigest()
    monkeypatch.setitem(PUBLISHED, "advection1d", [RemoteFile(NAME, id, md5, size_gib)])


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


# -- whole files -------------------------------------------------------------------------------------------------------


def test_a_file_is_fetched_once_and_then_reused(server, tmp_path):
    done = []
    path = download.get(NAME, tmp_path / "new", progress=lambda *so_far: done.append(so_far))
    assert path.read_bytes() == server.content and done[-1] == (len(server.content),) * 2
    assert download.get(NAME, tmp_path / "new") == path
    assert len(server.asked) == 1 and files(tmp_path / "new") == [NAME]


def test_what_a_broken_connection_brought_is_gone_on_with(server, tmp_path):
    server.breaks_after = [20_000, 0, 30_000, 0, 0, 0]
    assert download.get(NAME, tmp_path).read_bytes() == server.content
    assert server.asked[1:4] == ["bytes=20000-", "bytes=20000-", "bytes=50000-"]


def test_a_call_that_gave_up_keeps_what_has_come_for_the_next(server, tmp_path):
    server.breaks_after = [20_000, *[0] * download.TRIES]
    with pytest.raises(DataError, match=r"failed \(.* -> try again, what has come is kept"):
        download.get(NAME, tmp_path)
    assert files(tmp_path) == [f".{NAME}.part"]
    server.asked.clear()
    assert download.get(NAME, tmp_path).read_bytes() == server.content and server.asked == ["bytes=20000-"]


def test_of_two_downloads_at_once_one_waits_for_the_other(server, tmp_path, monkeypatch):
    monkeypatch.setattr(download, "POLL_S", 0.01)
    monkeypatch.setattr(download, "BLOCK", 10_000)
    waits, found = threading.Event(), []
    other = threading.Thread(
        target=lambda: found.append(download.get(NAME, tmp_path, progress=lambda *so_far: waits.set()))
    )

    def on_block(*so_far):
        if not other.ident:
            other.start()
        assert waits.wait(LONGEST_S)

    path = download.get(NAME, tmp_path, progress=on_block)
    other.join(LONGEST_S)
    assert found == [path] and path.read_bytes() == server.content
    assert len(server.asked) == 1 and files(tmp_path) == [NAME]


@pytest.mark.parametrize("says_length", [True, False])
def test_a_server_without_ranges_is_asked_from_the_beginning(server, tmp_path, says_length):
    server.ranges, server.says_length = False, says_length
    (tmp_path / f".{NAME}.part").write_bytes(b"of an earlier call")
    assert download.get(NAME, tmp_path).read_bytes() == server.content


@pytest.mark.parametrize("extra", [b"", b"longer than the file"])
def test_a_part_that_is_all_of_it_or_more_comes_to_the_right_file(server, tmp_path, extra):
    (tmp_path / f".{NAME}.part").write_bytes(server.content + extra)
    assert download.get(NAME, tmp_path).read_bytes() == server.content


@pytest.mark.parametrize("said", ["bytes */*", ""])
def test_a_whole_part_is_taken_though_the_server_does_not_say_how_long_the_file_is(server, tmp_path, said):
    server.says_range = said
    (tmp_path / f".{NAME}.part").write_bytes(server.content)
    assert download.get(NAME, tmp_path).read_bytes() == server.content


def test_wrong_content_leaves_no_file(server, tmp_path, monkeypatch):
    publish(monkeypatch, b"what was published")
    with pytest.raises(DataError, match="has the MD5 .* published is"):
        download.get(NAME, tmp_path)
    assert files(tmp_path) == []


def test_a_missing_page_is_said_with_its_code(server, tmp_path, monkeypatch):
    publish(monkeypatch, server.content, id=8)
    with pytest.raises(DataError, match="HTTP 404"):
        download.get(NAME, tmp_path)
    assert files(tmp_path) == []


def test_a_different_file_of_the_same_name_is_never_replaced(server, tmp_path):
    (tmp_path / NAME).write_bytes(b"generated")
    with pytest.raises(DataError, match="not the published file"):
        download.get(NAME, tmp_path)
    assert (tmp_path / NAME).read_bytes() == b"generated" and not server.asked


def test_too_little_disk_is_said_before_the_download(server, tmp_path, monkeypatch):
    publish(monkeypatch, server.content, size_gib=1e9)
    with pytest.raises(DataError, match="GiB are free"):
        download.get(NAME, tmp_path)
    assert not server.asked


# -- first samples -----------------------------------------------------------------------------------------------------


def test_first_samples_come_by_ranges_and_say_what_they_are_a_part_of(server, tmp_path):
    server.breaks_after = [10**9, 10**9, 100]  # and again after a break
    path = download.get(NAME, tmp_path, first=5)
    assert files(tmp_path) == ["1D_Advection_Sols_beta0.4_first5.hdf5"]
    (tmp_path / "whole").mkdir()
    whole = source.open_source("advection1d", download.get(NAME, tmp_path / "whole"))
    part = source.open_source("advection1d", path)
    np.testing.assert_array_equal(part.read_all()[0], whole.read(np.arange(5))[0])
    np.testing.assert_array_equal(part.times, whole.times)
    with h5py.File(path) as handle:
        assert handle.attrs["part_of"] == NAME and handle.attrs["part_of_samples"] == 50
        assert handle.attrs["part_of_url"].endswith(f"/{ID}") and handle.attrs["beta"] == 0.4


def test_few_bytes_are_fetched_for_a_few_samples(server, tmp_path, monkeypatch):
    monkeypatch.setattr(download, "BLOCK", 4096)
    download.get(NAME, tmp_path, first=2)
    spans = [tuple(map(int, asked[6:].split("-"))) for asked in server.asked]
    assert sum(last + 1 - first for first, last in spans) < len(server.content) / 2


def test_more_samples_than_there_are_is_refused(server, tmp_path):
    with pytest.raises(DataError, match="51 samples were asked for and the published file has 50"):
        download.get(NAME, tmp_path, first=51)
    assert files(tmp_path) == []


def test_parts_need_a_server_that_gives_them(server, tmp_path):
    server.ranges = False
    with pytest.raises(DataError, match="gives no parts of files -> fetch the whole file"):
        download.get(NAME, tmp_path, first=5)
    assert files(tmp_path) == []


# -- the list ----------------------------------------------------------------------------------------------------------


def test_the_table_is_well_formed():
    listed = [file for files in PUBLISHED.values() for file in files]
    assert PUBLISHED.keys() <= FAMILIES.keys()
    assert len({file.id for file in listed}) == len({file.md5 for file in listed}) == len(listed) > 50
    assert all(len(file.md5) == 32 and int(file.md5, 16) for file in listed)


def test_the_command_lists_and_fetches(server, tmp_path, capsys):
    assert command.main(["data", "list"]) == command.OK
    assert NAME in capsys.readouterr().out
    assert command.main(["data", "get", NAME, "-n", "3", "-o", str(tmp_path)]) == command.OK
    assert files(tmp_path) == ["1D_Advection_Sols_beta0.4_first3.hdf5"]
    assert "first3.hdf5" in capsys.readouterr().out
    assert command.main(["data", "get", "no.hdf5", "-o", str(tmp_path)]) == command.REFUSED
    assert "data list shows them" in capsys.readouterr().err
