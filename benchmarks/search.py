"""What the search for the fastest settings finds, beside the file that was written by hand.

    python benchmarks/search.py    # an hour on a quiet machine; writes outputs/reference/search/

The search is that of notebooks/04_phases.ipynb, from params/cpu_baseline.yaml on. What it has found and
params/cpu_optimized.yaml then take turns until both have trained for as many epochs, beside a third arm that is equal
to the first and shows how far two equal ones come out apart.
"""

import time

from keep import ROOT, arguments, save

from upsnb import overlays
from upsnb.compare import arms
from upsnb.compare.search import recommend
from upsnb.runs import runfolder
from upsnb.runs.runfolder import REPORT

BASELINE, BY_HAND = "cpu_baseline", "cpu_optimized"
FOUND = "found"


def main() -> None:
    parser = arguments(__doc__, "search")
    parser.add_argument("--minutes", type=float, default=40.0, help="the search begins nothing new after so many")
    args = parser.parse_args()
    folder, began = runfolder.new_folder("search"), time.monotonic()
    baseline, by_hand = (overlays.load(ROOT / f"params/{name}.yaml") for name in (BASELINE, BY_HAND))
    recommended = recommend(baseline, folder / "search", args.minutes, log=lambda text: print(text, flush=True))
    took_s = time.monotonic() - began
    found = overlays.apply(baseline, recommended["changes"])
    arms.compare(found, by_hand, folder / "arms", names=(FOUND, BY_HAND))
    compared = arms.compare_report(folder / "arms")
    numbers = ("speedup", "aa_ratio", "nrmse_ratio", "aa_nrmse_ratio")
    report = {
        "format": 1,
        "kind": "search",
        "params": [BASELINE, BY_HAND],
        "minutes": took_s / 60,
        "recommended": recommended,
        "settings": overlays.difference(type(baseline)(), baseline),
        "num_ranks": baseline.training.num_gpus,
        "compared": {name: compared[name] for name in numbers},
    }
    save(report, args.output / REPORT)


if __name__ == "__main__":
    main()
