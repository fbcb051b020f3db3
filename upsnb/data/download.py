"""Official PDEBench files from DaRUS, checked against their published MD5. Needs the network, and disk space."""

import os
import shutil
from pathlib import Path

from upsnb.data.families import FAMILIES
from upsnb.errors import DataError

URL = "https://darus.uni-stuttgart.de/api/access/datafile/{id}"


def download(family_name: str, which: str | float, root: str | os.PathLike, progressbar: bool = False) -> Path:
    """Fetch one official file into `root`, unless it is already there and intact.

    Args:
        which: the file's name, or its beta.
        progressbar: show one; needs tqdm.
    Returns:
        Path of the file; it appears under its name only when complete and its MD5 is right.
    """
    files = FAMILIES[family_name].remote if family_name in FAMILIES else ()
    if not files:
        hint = "" if family_name in FAMILIES else " (nor a known family)"
        listed = ", ".join(name for name, family in FAMILIES.items() if family.remote)
        raise DataError(f"no download listed for {family_name!r}{hint} -> one of {listed}")
    file = next((file for file in files if which in (file.name, file.parameter)), None)
    if file is None:
        parameter = next(iter(FAMILIES[family_name].parameters))
        known, names = (", ".join(parts) for parts in zip(*((f"{file.parameter:g}", file.name) for file in files)))
        raise DataError(f"no {family_name} file {which!r} -> a {parameter} of {known}, or one of {names}")
    path = Path(root) / file.name
    import pooch  # here, as only downloading needs it and its requests take a while to import

    if path.exists():
        if pooch.file_hash(str(path), alg="md5") != file.md5:
            # A generated or reduced file of the same name: the user's, not ours to replace.
            raise DataError(f"{path}: exists but is not the official file (MD5) -> move it, or choose another folder")
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    free_gib = shutil.disk_usage(path.parent).free / 2**30
    if free_gib < file.size_gib:
        raise DataError(
            f"{path}: needs about {file.size_gib:g} GiB, {free_gib:.1f} GiB are free -> choose another folder,"
            " or generate data of any size with upsnb.data.generate"
        )
    url = URL.format(id=file.id)
    try:
        fetch = pooch.HTTPDownloader(progressbar=progressbar, chunk_size=2**20)  # 1 KiB chunks would cost a CPU core
        pooch.retrieve(url, f"md5:{file.md5}", fname=file.name, path=path.parent, downloader=fetch)
    except (OSError, ValueError) as error:  # requests' errors are OSErrors, a wrong MD5 is a ValueError
        raise DataError(f"{path}: download from {url} failed ({error}) -> try again, or fetch it by hand") from error
    return path
