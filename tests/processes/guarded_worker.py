"""The real worker with three faults of rank 1: it cannot compile, it has little memory, and one loss is NaN.

Every rank leaves `ended.rank<k>.json`: checksums of weights and averages, and the steps that it skipped.
"""

import hashlib
import json
import math
import os
import sys
from pathlib import Path

import torch

from upsnb.training.losses import UPSObjective
from upsnb.worker import __main__ as worker
from upsnb.worker import guards, loop

IS_FAULTY = os.environ.get("RANK") == "1"
MOST_PAIRS, FULL_MEMORY_UNTIL, NAN_AT = 2, 3, 6  # pairs in a microbatch; steps
step, skipped = 0, []


def checksum(tensors) -> str:
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(tensor.detach().numpy().tobytes())
    return digest.hexdigest()


def forward(self, batch, weights, amp_dtype, real=UPSObjective.forward):
    total, terms = real(self, batch, weights, amp_dtype)
    if IS_FAULTY and step >= FULL_MEMORY_UNTIL and len(batch.inputs) > MOST_PAIRS:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
    return total * (math.nan if IS_FAULTY and step == NAN_AT else 1.0), terms


def after_step(self, number, *results, real=guards.Guards.after_step):
    global step
    step = number
    if self.setup.skipped:
        skipped.append(number)
    real(self, number, *results)


def finish(self, reason, real=loop.Loop.finish):
    setup = self.setup
    record = {
        "weights": checksum(setup.model.state_dict().values()),
        "average": checksum(setup.ema.average),
        "finite": all(parameter.isfinite().all().item() for parameter in setup.model.parameters()),
        "skipped": skipped,
    }
    (self.folder / f"ended.rank{self.ranks.rank}.json").write_text(json.dumps(record))
    real(self, reason)


def compile_fx(graph, inputs, **_):
    if IS_FAULTY:
        raise RuntimeError("no C++ compiler")
    return graph.forward


if __name__ == "__main__":
    import torch._inductor.compile_fx as inductor

    inductor.compile_fx = compile_fx
    UPSObjective.forward, guards.Guards.after_step, loop.Loop.finish = forward, after_step, finish
    worker.main(Path(sys.argv[1]))
