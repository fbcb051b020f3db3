"""Settings of each example with which it trains in seconds."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SMALL = {
    "affinity": {
        "workload": "examples/affinity/workload.py:Affinity",
        "workload_settings": {
            "num_clusters": 30,
            "num_pairs": 600,
            "shortest": 12,
            "longest": 18,
            "sites": 2,
            "num_motifs": 3,
            "tried": 8,
        },
        "data.split": {"validation_fraction": 0.2, "test_fraction": 0.2},
        "model.settings": {"width": 16, "head_width": 16, "search_width": 8},
        "training.batch_size": 16,
        "optimizer": {"lr": 2e-3, "muon_lr": 4e-3},
    },
    "long_context": {
        "workload": "examples/long_context/workload.py:LongContext",
        "workload_settings": {"context": 96, "vocabulary": 400, "chunks": 40, "needles": 1},
        "training.batch_size": 4,
        "optimizer": {"lr": 3e-3, "muon_lr": 1e-2},
    },
    "mmdit": {
        "workload": "examples/mmdit/workload.py:TextToPicture",
        "workload_settings": {"buckets": {"square": [20, 20], "wide": [12, 40]}, "pictures": 40, "steps": 2},
        "model.settings": {"width": 16, "depth": 2, "num_heads": 2},
        "training.batch_size": 8,
        "optimizer.name": "adamw",
    },
}
COMMON = {
    "data.datasets": {},
    "training.device": "cpu",
    "training.threads_per_rank": 1,
    "stages.operator.epochs": 1,
    "checkpoint.interval": 100000,
}
