"""FlexAttention beside the kernel that torch chooses, on packed documents that do not see each other. Needs a GPU.

    python benchmarks/attention.py    # two minutes; writes outputs/reference/attention/

The one leaves out blocks of scores that no token may see, the other is given the mask written out. They take turns:
attention alone, forward and backward, at the heads of examples/long_context; and whole steps as its params/1gpu.yaml
says, one chunk each, eager but for FlexAttention itself. Both see the same documents.
"""

import gc
from collections.abc import Callable
from statistics import median

import torch
from keep import ROOT, arguments, save
from torch import Tensor

from examples.long_context.model import SIZES, same_document, same_document_blocks
from upsnb import hardware, overlays
from upsnb.models.transformer import attend
from upsnb.runs.runfolder import REPORT
from upsnb.training.parallel import Ranks
from upsnb.training.setup import Setup

KERNELS = ("sdpa", "flex")
CONTEXTS = (2048, 8192, 32768)
ROUNDS, STEPS = 4, 3  # turns of each kernel, calls of a turn
ONE_CHUNK = {"training.accum_steps": 1, "training.batch_size": 1, "training.compile": False}
FEW_CHUNKS = 40  # of the corpus, a tenth of them for validation and a tenth for the test


def alternate(calls: dict[str, Callable[[], None]]) -> dict[str, float]:
    """Time of one call of each [ms], median over turns but for the first, which compiles."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(1 + ROUNDS):
        for name, call in calls.items():
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            for _ in range(STEPS):
                call()
            end.record()
            end.synchronize()
            times[name].append(begin.elapsed_time(end) / STEPS)
    return {name: median(those[1:]) for name, those in times.items()}


def peaks(calls: dict[str, Callable[[], None]]) -> dict[str, float]:
    """Memory at the fullest moment of one call of each, beside what was there before [GiB]."""
    found = {}
    for name, call in calls.items():
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        call()
        found[name] = (torch.cuda.max_memory_allocated() - before) / 2**30
    return found


def alone(documents_BN: Tensor) -> dict[str, Callable[[], None]]:
    """Attention with each kernel, forward and backward; masks are there, as each step makes one for all blocks."""
    width, _, heads, kv_heads = SIZES["small"]
    shapes = [(1, count, documents_BN.shape[1], width // heads) for count in (heads, kv_heads, kv_heads)]
    q, k, v = (torch.randn(shape, device="cuda", dtype=torch.bfloat16, requires_grad=True) for shape in shapes)
    masks = {"sdpa": same_document(documents_BN), "flex": same_document_blocks(documents_BN)}

    def call(kernel: str) -> None:
        keys = (k, v) if kernel == "flex" else (x.repeat_interleave(heads // kv_heads, dim=1) for x in (k, v))
        attend(q, *keys, kernel, masks[kernel]).sum().backward()

    return {kernel: lambda kernel=kernel: call(kernel) for kernel in KERNELS}


def steps(context: int) -> tuple[dict[str, Callable[[], None]], Tensor]:
    """A step with each kernel, of a model of its own; and which document each token of the first chunk is of."""
    calls = {}
    for kernel in KERNELS:
        settings = {"context": context, "vocabulary": 8192, "chunks": FEW_CHUNKS}
        config = overlays.load(
            ROOT / "examples/long_context/params/1gpu.yaml",
            overrides={**ONE_CHUNK, "data.workload_settings": settings, "operator.pdet.attention": kernel},
        )
        hardware.check_runnable(config, hardware.detect())
        setup = Setup.build(config, ROOT, Ranks(device=torch.device("cuda", 0)))
        batches = setup.loader.peek()
        calls[kernel] = lambda setup=setup, batches=batches: setup.step(batches, 0)
    return calls, batches[0].documents[:1, :-1]


def main() -> None:
    parser = arguments(__doc__, "attention")
    parser.add_argument("--contexts", nargs="+", type=int, default=CONTEXTS, help="tokens of a chunk")
    args, rows = parser.parse_args(), []
    for context in args.contexts:
        whole, documents = steps(context)
        row = {"context": context, "documents": len(documents.unique())}
        for name, calls in (("step", whole), ("alone", alone(documents))):
            row |= {f"{name}_ms": alternate(calls), f"{name}_gib": peaks(calls)}
        rows.append(row)
        save({"format": 1, "kind": "attention", "rows": rows}, args.output / REPORT)
        del whole, calls
        gc.collect()


if __name__ == "__main__":
    main()
