"""How long a save stops training, written at once and in the background; on a quiet machine.

python benchmarks/checkpoints.py [--mib 600] [--repeats 10] [--device cpu] [--output FILE]

The state is that of AdamW: weights and two moments of a transformer's shapes. Saves of both kinds take turns, and the
next one begins only when the one before is on the disk, so that none pays for another.
"""

from __future__ import annotations

import statistics
import tempfile
from pathlib import Path

import torch
from keep import arguments, save

from upsnb.runs.events import EventWriter, read_events
from upsnb.training.checkpoint import Saver
from upsnb.training.parallel import Ranks

CLAIM = 0.05  # an asynchronous save stalls training by less than this share of a synchronous one


def make_state(mib: int, device: torch.device) -> dict:
    """Weights and two moments each, in matrices of 1536 x 384."""
    num_matrices = max(1, round(mib * 2**20 / (3 * 4 * 1536 * 384)))
    model = {f"blocks.{number}.weight": torch.randn(1536, 384, device=device) for number in range(num_matrices)}
    moments = {name: {"exp_avg": w.clone(), "exp_avg_sq": w.square()} for name, w in model.items()}
    return {"setup": {"model": model, "moments": moments}}


def measure(folder: Path, state: dict, device: torch.device, repeats: int) -> list[dict]:
    """Checkpoint events of alternating saves; the first of each kind is a warm-up and is left out."""
    (folder / "checkpoints").mkdir()
    saver = Saver(folder, Ranks(device=device), EventWriter(folder))
    # without this a synchronous save would give the host memory of the asynchronous ones back each time
    background = Saver(folder, Ranks(device=device), EventWriter(folder))
    for repeat in range(repeats + 1):
        for number, (kind, asynchronous) in enumerate(((saver, False), (background, True))):
            kind.save({**state, "step": 2 * repeat + number}, (), asynchronous)
            kind.wait()
    saver.close()
    background.close()
    return read_events(folder, ("checkpoint",))[2:]


def main() -> None:
    parser = arguments(__doc__, "checkpoints/stall.json")
    parser.add_argument("--mib", type=int, default=600)
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()
    device = torch.device(options.device)
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as folder:
        events = measure(Path(folder), make_state(options.mib, device), device, options.repeats)
    stalls = {kind: [e["stall_s"] for e in events if e["asynchronous"] == kind] for kind in (False, True)}
    ratios = [later / at_once for at_once, later in zip(stalls[False], stalls[True], strict=True)]
    result = {
        "format": 1,
        "size_mib": events[0]["size_mib"],
        "repeats": options.repeats,
        "device": device.type,
        "synchronous_stall_s": stalls[False],
        "asynchronous_stall_s": stalls[True],
        "asynchronous_save_s": [e["save_s"] for e in events if e["asynchronous"]],
        "stall_ratio_median": round(statistics.median(ratios), 5),
        "stall_ratio_range": [round(min(ratios), 5), round(max(ratios), 5)],
        "claim": CLAIM,
    }
    save(result, options.output)


if __name__ == "__main__":
    main()
