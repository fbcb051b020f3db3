"""Official PDEBench files from DaRUS, checked against their published MD5. Needs the network, and disk space."""

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from upsnb.data.families import FAMILIES
from upsnb.errors import DataError

URL = "https://darus.uni-stuttgart.de/api/access/datafile/{id}"


@dataclass(frozen=True)
class RemoteFile:
    """One file as published (doi:10.18419/darus-2986)."""

    id: int  # of the data file in DaRUS
    md5: str
    beta: float
    size_gib: float


# Facts from pdebench/data_download/pdebench_data_urls.csv of the PDEBench repository; ids elsewhere may be stale.
FILES: dict[str, dict[str, RemoteFile]] = {
    "advection1d": {
        f"1D_Advection_Sols_beta{beta}.hdf5": RemoteFile(id, md5, beta, size_gib=7.7)
        for beta, id, md5 in (
            (0.1, 255672, "b4be2fc3383f737c76033073e6d2ccfb"),
            (0.2, 255671, "d47b52c1be4b6bcaa8748a8df2f5fbb8"),
            (0.4, 255674, "d595bbfd2c659df995a93cd40d6ea568"),
            (0.7, 255666, "f89030c240a1e90b55649776854a84c2"),
            (1.0, 255675, "1fe41923a4123db55bf4e89bea32e142"),
            (2.0, 255677, "0e9beff98693089c38e213a1f2b9ac43"),
            (4.0, 255676, "a87b03ff425496360e2732921805f47d"),
            (7.0, 255664, "72a286ad2fcba574bd20bc045ba82d58"),
        )
    },
    "darcy2d": {
        f"2D_DarcyFlow_beta{beta}_Train.hdf5": RemoteFile(id, md5, beta, size_gib=1.3)
        for beta, id, md5 in (
            (0.01, 133217, "d05c287d4c0b7d3178b0097084238251"),
            (0.1, 133218, "294f9a03a4aa16b0e386469ca8b471be"),
            (1.0, 133219, "81694ed31306ff2e5f6b76349b0b4389"),
            (10.0, 133220, "a7f23cf8011fc211b180828af39b7d1a"),
            (100.0, 133221, "7c09f3b1bb097737d3fd52ffb0c6f1c8"),
        )
    },
}


def download(family_name: str, which: str | float, root: str | os.PathLike, progressbar: bool = False) -> Path:
    """Fetch one official file into `root`, unless it is already there and intact.

    Args:
        which: the file's name, or its beta.
        progressbar: show one; needs tqdm.
    Returns:
        Path of the file; it appears under its name only when complete and its MD5 is right.
    """
    if family_name not in FILES:
        hint = "" if family_name in FAMILIES else " (nor a known family)"
        raise DataError(f"no download listed for {family_name!r}{hint} -> one of {', '.join(FILES)}")
    files = FILES[family_name]
    names = [name for name, file in files.items() if which in (name, file.beta)]
    if not names:
        betas = ", ".join(f"{file.beta:g}" for file in files.values())
        raise DataError(f"no {family_name} file {which!r} -> a beta of {betas}, or one of {', '.join(files)}")
    name, path = names[0], Path(root) / names[0]
    import pooch  # here, as only downloading needs it and its requests take a while to import

    if path.exists():
        if pooch.file_hash(str(path), alg="md5") != files[name].md5:
            # A generated or reduced file of the same name: the user's, not ours to replace.
            raise DataError(f"{path}: exists but is not the official file (MD5) -> move it, or choose another folder")
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    free_gib = shutil.disk_usage(path.parent).free / 2**30
    if free_gib < files[name].size_gib:
        raise DataError(
            f"{path}: needs about {files[name].size_gib:g} GiB, {free_gib:.1f} GiB are free -> choose another folder,"
            " or generate data of any size with upsnb.data.generate"
        )
    url = URL.format(id=files[name].id)
    try:
        fetch = pooch.HTTPDownloader(progressbar=progressbar, chunk_size=2**20)  # 1 KiB chunks would cost a CPU core
        pooch.retrieve(url, f"md5:{files[name].md5}", fname=name, path=path.parent, downloader=fetch)
    except (OSError, ValueError) as error:  # requests' errors are OSErrors, a wrong MD5 is a ValueError
        raise DataError(f"{path}: download from {url} failed ({error}) -> try again, or fetch it by hand") from error
    return path
