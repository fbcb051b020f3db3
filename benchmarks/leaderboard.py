"""Four models on one leaderboard: UPS, U-Net, FNO and neuraloperator's FNO, five minutes and three seeds each.

    make .extras/.installed
    PYTHONPATH=. .extras/bin/python benchmarks/leaderboard.py ../shared/data/pdebench-small    # 80 quiet minutes

The folder holds two small files of PDEBench, advection and Darcy flow, and every model trains on both at once. Before
that, each is trained for 40 s with its file's learning rates, with half and with twice of them; validation chooses.
The board that is kept tried once, twice and four times what the files said then; they say now what it chose.
Nothing is compiled and no phase is on, so the board is about models. Writes outputs/reference/leaderboard/.
"""

import math
import shutil
from pathlib import Path

from keep import ROOT, arguments, relative, save

from upsnb import overlays
from upsnb.compare import board, board_pages, models, models_figures
from upsnb.config import RunConfig
from upsnb.runs import runfolder

MODELS, SEEDS, TIME_S = ("ups", "unet", "fno", "neuralop"), (42, 43, 44), 300.0
FACTORS, TUNING_S = (0.5, 1.0, 2.0), 40.0
WHOLE = {  # both files to their last sample; PDEBench's own test share
    "data.datasets.advection.num_samples": None,
    "data.datasets.darcy.num_samples": None,
    "data.split": {"validation_fraction": 0.1, "test_fraction": 0.1},
}


def with_rates(config: RunConfig, factor: float, **more) -> RunConfig:
    """Both learning rates times a factor."""
    rates = {f"optimizer.{rate}": factor * getattr(config.optimizer, rate) for rate in ("lr", "muon_lr")}
    return overlays.apply(config, {**rates, **more})


def tuned(configs: dict[str, RunConfig], folder: Path, time_s: float) -> tuple[dict[str, RunConfig], dict]:
    """Each model with those of its learning rates that validate best after a short training, and what all came to."""
    short = {"training.time_limit_s": time_s, "evaluation.split": "validation"}
    trials = {
        f"{name} x {factor:g}": with_rates(config, factor, **short)
        for name, config in configs.items()
        for factor in FACTORS
    }
    found, best = {name: {} for name in configs}, {}
    for row in models.train(trials, folder)["rows"]:
        name, _, factor = row["model"].partition(" x ")
        found[name][factor] = {"nrmse": row["nrmse"], "score": min(map(score, row["validations"]))}
    for name, config in configs.items():
        factor = float(min(found[name], key=lambda factor: found[name][factor]["score"]))
        best[name] = with_rates(config, factor)
        found[name]["chosen"] = factor
    return best, found


def score(validation: list) -> float:
    """The errors of one validation, over all datasets."""
    errors = list(validation[1].values())
    return math.inf if None in errors else sum(errors)


def main() -> None:
    parser = arguments(__doc__, "leaderboard")
    parser.add_argument("data", type=Path, help="where PDEBench's small files are")
    parser.add_argument("--time", type=float, default=TIME_S, help="training of each model [s]")
    parser.add_argument("--tuning", type=float, default=TUNING_S, help="training for each learning rate [s]")
    args = parser.parse_args()
    own = {**WHOLE, "data.root": str(args.data.absolute()), "training.time_limit_s": args.time}
    base = overlays.load(*(ROOT / f"params/{name}.yaml" for name in ("quick", "pdebench_files")), overrides=own)
    work = runfolder.new_folder("leaderboard")
    configs, rates = tuned(models.plan(base, MODELS), work / "tuning", args.tuning)
    trained = models.train(configs, work, SEEDS)
    ranked = relative(board.board([work / "runs"]), work, {ROOT, args.data.absolute()})
    board_pages.write(ranked, args.output)
    for path in models_figures.write_figures(work).values():
        shutil.copyfile(path, args.output / path.name)
    curves = [{key: row[key] for key in ("model", "seed", "nrmse", "steps", "validations")} for row in trained["rows"]]
    save({"learning_rates": rates, "trainings": curves}, args.output / "trainings.json")
    print(board.summary(ranked))


if __name__ == "__main__":
    main()
