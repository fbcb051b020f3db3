"""Keep what a run found as evidence: its report, figures and executed notebook, in outputs/reference/.

    python benchmarks/keep.py outputs/quick-20261121-133236 quick

Paths of this machine become relative ones, everywhere but in pictures. What is left of others is an error, and so is a
notebook that failed. What was kept under the name before is replaced.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import sys
from pathlib import Path

from upsnb.errors import RunError
from upsnb.report.file import finish
from upsnb.runs import runfolder
from upsnb.runs.runfolder import FIGURES, REPORT

ROOT = Path(__file__).resolve().parents[1]
REFERENCE = ROOT / "outputs/reference"
NOTEBOOK = "notebook.ipynb"
PICTURE = "image/png"  # base64, in which any letters may stand
LARGE = 2**20  # bytes above which a kept notebook is worth a word
MACHINE_PATH = re.compile(
    r"(?<![\w.])/(?:Users|content|home|media|mnt|opt|private|root|srv|tmp|usr|var|work|workspace)/[^\s'\"]*"
)


def keep(folder: Path, name: str, reference: Path = REFERENCE) -> list[Path]:
    """Copy a run folder's evidence to `reference/name/`; the files written.

    Raises:
        RunError: nothing to keep, a notebook that failed, or a path of this machine that cannot be made relative.
    """
    folder, target = Path(folder).absolute(), reference / name
    executed, report = folder / NOTEBOOK, folder / REPORT
    missing = [path.name for path in (executed, report) if not path.is_file()]
    if missing:
        raise RunError(f"{folder}: has no {' and no '.join(missing)} -> run a notebook with python -m upsnb run")
    texts = {path.name: json.loads(path.read_text()) for path in (report, executed)}
    papermill = texts[NOTEBOOK]["metadata"]["papermill"]
    if papermill["exception"]:
        raise RunError(f"{executed}: failed -> run it again")
    texts[NOTEBOOK]["metadata"].pop("widgets", None)  # half a megabyte of panels, in whose place pictures are shown
    roots = {ROOT, Path(papermill["input_path"]).parents[1]}  # of this clone, and of the run's
    texts = {file: relative(value, folder, roots) for file, value in texts.items()}
    left = [f"{file}: {path}" for file, value in texts.items() for path in machine_paths(value)]
    if left:
        raise RunError("\n  ".join(["paths of this machine are left -> run the notebook without them", *left]))
    target.mkdir(parents=True, exist_ok=True)
    for old in (*target.glob("*.png"), target / REPORT, target / NOTEBOOK):
        old.unlink(missing_ok=True)
    for file, value in texts.items():
        (target / file).write_text(json.dumps(value, indent=1, ensure_ascii=False) + "\n")
    figures = [shutil.copyfile(path, target / path.name) for path in sorted((folder / FIGURES).glob("*.png"))]
    return [*(target / file for file in texts), *figures]


def arguments(doc: str, output: str = "") -> argparse.ArgumentParser:
    """The command line of a benchmark.

    Args:
        doc: its docstring, which is its help.
        output: where it writes below outputs/reference/, unless `--output` says otherwise.
    """
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    if output:
        parser.add_argument("--output", type=Path, default=REFERENCE / output)
    return parser


def save(report: dict, path: Path) -> None:
    """Write what a benchmark of this machine found, with hardware, versions, revision and date; and print it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    runfolder.write_json(path, finish(report, None))
    print(path.read_text())


def relative(value, folder: Path, roots: set[Path]):
    """Plain data with paths below the project, and those of the run folder wherever it is, as relative ones."""
    places = {str(root): "." for root in roots}
    if not any(folder.is_relative_to(root) for root in roots):
        places[str(folder)] = folder.name
    pattern = "|".join(re.escape(place) for place in sorted(places, key=len, reverse=True))
    whole = re.compile(rf"({pattern})(?![\w.-])(/?)")

    def shorter(found: re.Match) -> str:
        short = places[found[1]]
        return short + found[2] if short != "." else "" if found[2] else short

    return _changed(value, lambda text: whole.sub(shorter, text))


def machine_paths(value) -> list[str]:
    """Absolute paths in plain data, pictures left out."""
    found: list[str] = []
    _changed(value, lambda text: found.extend(MACHINE_PATH.findall(text)))
    return found


def _changed(value, change):
    """The same data with every text changed, keys and pictures left as they are."""
    if isinstance(value, dict):
        return {key: inner if key == PICTURE else _changed(inner, change) for key, inner in value.items()}
    if isinstance(value, list):
        return [_changed(inner, change) for inner in value]
    return change(value) if isinstance(value, str) else value


def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument("folder", type=Path, help="run folder of a notebook that ran to its end")
    parser.add_argument("name", help="for example quick; a second machine's may be phases-h200")
    args = parser.parse_args()
    try:
        written = keep(args.folder, args.name)
    except RunError as error:
        print(error, file=sys.stderr)
        return 1
    for path in written:
        size = path.stat().st_size
        word = ", larger than 1 MiB: most of it pictures" if size > LARGE else ""
        print(f"{path.relative_to(ROOT)}: {size / 2**20:.2f} MiB{word}")
    print("now: python benchmarks/readme.py")
    return 0


if __name__ == "__main__":
    sys.exit(main())
