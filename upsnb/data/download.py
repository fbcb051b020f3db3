"""Official PDEBench files from DaRUS, checked against their published MD5. Needs the network, and disk space."""

import os
import re
import shutil
from pathlib import Path

from upsnb.data.families import FAMILIES
from upsnb.data.published import PUBLISHED
from upsnb.errors import DataError

URL = "https://darus.uni-stuttgart.de/api/access/datafile/{id}"


def download(family_name: str, which: str | float, root: str | os.PathLike, progressbar: bool = False) -> Path:
    """Fetch one official file into `root`, unless it is already there and intact.

    Args:
        which: the file's name, or the value of the family's first parameter, if one file alone has it.
        progressbar: show one; needs tqdm.
    Returns:
        Path of the file; it appears under its name only when complete and its MD5 is right.
    """
    files = PUBLISHED.get(family_name)
    if files is None:
        hint = "" if family_name in FAMILIES else " (nor a known family)"
        raise DataError(f"no download listed for {family_name!r}{hint} -> one of {', '.join(PUBLISHED)}")
    names = {file.name: file for file in files}
    if (name := which) not in names:
        first = next(iter(FAMILIES[family_name].parameters), "")
        called = [name for name in names if re.search(rf"{first}{which}(?=[._]\D)", name, re.IGNORECASE)]
        if first == "" or len(called) != 1:
            raise DataError(f"no {family_name} file {which!r} -> one of {', '.join(names)}")
        (name,) = called
    file = names[name]
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
