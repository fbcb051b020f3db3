"""Let a public copy of this repository be opened in Colab from its README.

python benchmarks/badges.py OWNER/NAME --revision v1.0   # a tag or branch of it on GitHub that has what this writes
python benchmarks/badges.py ""                           # take them out again

Writes a badge for each notebook into README.md, and address and revision into the first cell of each, which then clones
that revision and needs no secret. Commit it, and give the commit that tag.
"""

import argparse
import json
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
COLAB = "https://colab.research.google.com"
BLOCK = re.compile(r"(?<=<!--badges-->\n).*?(?=<!--/badges-->)", re.DOTALL)
CELL = re.compile(r'^_repository, _revision = ".*", ".*"', re.MULTILINE)


def badge(repository: str, revision: str, notebook: str) -> str:
    """What opens a notebook in Colab, as Markdown."""
    address = f"{COLAB}/github/{repository}/blob/{revision}/notebooks/{notebook}.ipynb"
    return f"{notebook} [![open {notebook} in Colab]({COLAB}/assets/colab-badge.svg)]({address})"


def write(root: Path, repository: str, revision: str) -> None:
    """
    Args:
        repository: owner/name on GitHub; empty: none.
    """
    notebooks = sorted((root / "notebooks").glob("*.ipynb"))
    cloned = f"https://github.com/{repository}.git" if repository else ""
    line = f'_repository, _revision = "{cloned}", "{revision if repository else ""}"'
    for path in notebooks:
        notebook = json.loads(path.read_text())
        (cell,) = (cell for cell in notebook["cells"] if "colab" in cell["metadata"].get("tags", ()))
        source, found = CELL.subn(line, "".join(cell["source"]))
        if found != 1:
            raise SystemExit(f"{path}: its first cell has no line for an address -> take the cell of 01_train.ipynb")
        cell["source"] = source.splitlines(keepends=True)
        path.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n")
    badges = [badge(repository, revision, path.stem) for path in notebooks] if repository else []
    readme = root / "README.md"
    text, found = BLOCK.subn("".join(f"{one}\n" for one in badges), readme.read_text())
    if found != 1:
        raise SystemExit(f"{readme}: has no place between <!--badges--> and <!--/badges--> -> put it there")
    readme.write_text(text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("repository", metavar="OWNER/NAME")
    parser.add_argument("--revision", default="main")
    args = parser.parse_args()
    if args.repository and not re.fullmatch(r"[\w.-]+/[\w.-]+", args.repository):
        parser.error(f"{args.repository}: is no owner/name, such as GitHub's addresses end with")
    if not re.fullmatch(r"[\w./-]+", args.revision):
        parser.error(f"{args.revision}: is no tag or branch")
    write(ROOT, args.repository, args.revision)


if __name__ == "__main__":
    main()
