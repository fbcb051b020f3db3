"""The other end of a pull: run by whatever Python 3 the other machine has, from the standard library alone.

python3 there.py list FOLDER              sizes, times and SHA-256 of the files of a run's folder, as JSON
python3 there.py send FOLDER < names      those files as a tar, each as long as it is by then; checksums last
"""

import hashlib
import io
import json
import os
import re
import sys
import tarfile

SUMS = ".sums"  # last member of the tar: what was sent, by name; what had gone by then is not in it
BLOCK_BYTES = 1 << 20
HIDDEN = re.compile(r"\.lock|\.reserve|\..*\.\d+")  # the last: files that are being written


def named(folder):
    """The files of a folder that somebody may want, by name."""
    for place, folders, files in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in sorted(files):
            path = os.path.join(place, name)
            if not HIDDEN.fullmatch(name) and os.path.isfile(path) and not os.path.islink(path):
                yield os.path.relpath(path, folder), path


def listed(folder):
    """`{name: {bytes, sha256}}` of a folder's files."""
    found = {}
    for name, path in named(folder):
        try:
            with open(path, "rb") as file:
                total = hashlib.sha256()
                for block in iter(lambda: file.read(BLOCK_BYTES), b""):
                    total.update(block)
                found[name] = {"bytes": file.tell(), "sha256": total.hexdigest()}
        except FileNotFoundError:  # a run deletes older checkpoints
            continue
    return found


class Hashed:
    """A file whose checksum is that of what was read of it so far."""

    def __init__(self, file):
        self.file, self.total = file, hashlib.sha256()

    def read(self, size):
        block = self.file.read(size)
        self.total.update(block)
        return block


def send(folder, names, stream):
    """Write files into a tar on a stream."""
    sums = {}
    with tarfile.open(mode="w|", fileobj=stream) as tar:
        for name in names:
            try:
                file = open(os.path.join(folder, name), "rb")
            except FileNotFoundError:
                continue
            with file:
                seen = os.fstat(file.fileno())
                member = tarfile.TarInfo(name)
                member.size, member.mtime = seen.st_size, seen.st_mtime
                hashed = Hashed(file)
                tar.addfile(member, hashed)
                sums[name] = hashed.total.hexdigest()
        text = json.dumps(sums).encode()
        member = tarfile.TarInfo(SUMS)
        member.size = len(text)
        tar.addfile(member, io.BytesIO(text))


if __name__ == "__main__":
    what, folder = sys.argv[1:]
    if what == "list":
        json.dump(listed(folder), sys.stdout)
    else:
        send(folder, json.load(sys.stdin), sys.stdout.buffer)
