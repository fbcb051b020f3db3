"""What is generated beside what is published: fields, sizes and spectra, and flows gone on with from a published frame.

    python benchmarks/families.py ../shared/data/pdebench-small      # a minute a family; or --only cfd2d cfd3d

The folder holds small files of PDEBench. Each is compared with samples of its row's solver at its grid, times and
parameters: figures and families.json in outputs/reference/families/. Where a solver can start from any state, it also
starts from the first frames of the file, and the nRMSE at later frames is noted for every channel. Families that nobody
published are drawn alone, at the size that their rows give.
"""

import json
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from keep import arguments, save

from upsnb.data.families import FAMILIES
from upsnb.data.generate import generate
from upsnb.data.source import Source, open_source
from upsnb.report import style
from upsnb.report.style import FIELD_COLOURS, draw_image, empty_figure, label, legend, styled, value_range
from upsnb.solvers.finite_volumes import burgers, compressible
from upsnb.solvers.projection import carried_dye, centred
from upsnb.solvers.sorption import diffusion_sorption
from upsnb.solvers.spectral import fitzhugh_nagumo, reaction_diffusion
from upsnb.training.metrics import energy_spectrum

MOST_SAMPLES = 16
LATER = (0.05, 0.25, 0.5, 1.0)  # of the whole time: frames at which a flow that was gone on with is compared


def _gas(dims: int):
    """Compressible flow with channels in the file's order: density, pressure, velocities."""
    order = [0, *range(2, 2 + dims), 1]

    def solve(first, parameters, times):
        cell = (2 if dims == 1 else 1) / first.shape[-1]
        flow = compressible(first[:, order], parameters["eta"], parameters["zeta"], cell, times)
        return flow[:, :, np.argsort(order)]

    return solve


def _dye(first, parameters, times):
    """Incompressible flow of cells one wide, as in the published file, from velocity, dye and force on centres."""
    flows = []
    for vx, vy, dye, *force in first:
        faces = (vx[1:] + vx[:-1]) / 2, (vy[:, 1:] + vy[:, :-1]) / 2
        frames = carried_dye(*faces, dye, np.stack(force), parameters["NU"], times, length=len(dye))
        flows.append([[*centred(u, v), carried] for u, v, carried in frames])
    return np.array(flows)


STARTED = {  # family: (n, C and what is given, *grid), parameters and times to (n, T, C, *grid)
    "burgers1d": lambda first, parameters, times: burgers(first[:, 0], parameters["Nu"], times)[:, :, None],
    "reacdiff1d": lambda first, parameters, times: reaction_diffusion(first[:, 0], *parameters.values(), times)[
        :, :, None
    ],
    "diffsorp1d": lambda first, parameters, times: np.stack(
        [diffusion_sorption(start, times, **parameters)[:, None] for start in first[:, 0]]
    ),
    "diffreact2d": lambda first, parameters, times: fitzhugh_nagumo(
        first, (parameters["Du"], parameters["Dv"]), parameters["k"], times
    ),
    "incompressible2d": _dye,
    **{f"cfd{dims}d": _gas(dims) for dims in (1, 2, 3)},
}


def gone_on_with(source: Source, fields: np.ndarray, parameters: dict) -> dict:
    """nRMSE of our flow from the file's first frame, mean over samples: channel -> one number for each time."""
    frames = sorted({round(part * (source.num_times - 1)) for part in LATER} - {0})
    times, space = source.times[[0, *frames]].astype(np.float64), tuple(range(3, fields.ndim))
    first = source.read(np.arange(source.num_samples), [0])[0][:, 0].astype(np.float64)
    found = STARTED[source.family.name](first, parameters, times)[:, 1:]
    error = np.sqrt(((found - fields[:, frames]) ** 2).mean(space) / (fields[:, frames] ** 2).mean(space)).mean(axis=0)
    told = {channel: error[:, number].round(6).tolist() for number, channel in enumerate(source.family.channels)}
    return {"times": times[1:].round(6).tolist(), "nrmse": told}


def sizes(fields: np.ndarray, channels) -> dict:
    """Range, mean and spread of every channel, and the mean square's share in each shell of wavenumbers at the end."""
    energy = energy_spectrum(torch.from_numpy(fields[:, -1:]))[1].mean(dim=(0, 1))[:, 1:]
    shares = (energy / energy.sum(dim=1, keepdim=True).clamp_min(1e-12))[:, :8].tolist()
    return {
        channel: {
            **{name: float(getattr(fields[:, :, number], name)()) for name in ("min", "max", "mean", "std")},
            "energy_shares": [round(share, 6) for share in shares[number]],
        }
        for number, channel in enumerate(channels)
    }


@styled
def side_by_side(pair: dict[str, Source], fields: dict[str, np.ndarray], title: str):
    """First channel: three samples, over time in 1D, or one at three times in 2D and 3D; and spectra at both ends."""
    family = pair["generated"].family
    dims = family.num_dims
    figure = empty_figure(9.0, 1.9 * len(pair) if len(pair) > 1 else 2.6, title)
    left, right = figure.subfigures(1, 2, width_ratios=[2.1, 1])
    grid, curve = left.subplots(len(pair), 3, sharex=True, sharey=True, squeeze=False), right.subplots()
    for row, (name, values) in zip(grid, fields.items(), strict=True):
        last = values.shape[1] - 1
        if dims == 1:
            images = [(f"{name}, sample {n}", values[n % len(values), :, 0]) for n in range(3)]
        else:
            shown = [(n, 0) for n in range(3)] if last == 0 else [(0, frame) for frame in (0, last // 2, last)]
            images = []
            for sample, frame in shown:
                image = values[sample, frame, 0]
                image = image if dims == 2 else image[:, :, image.shape[-1] // 2]
                when = f"sample {sample}" if last == 0 else f"t = {pair[name].times[frame]:.3g}"
                images.append((f"{name}, {when}", image.T))
        (low, high), norm = family.domain[0], value_range(np.stack([image for _, image in images]))
        above = pair[name].times[[0, -1]] if dims == 1 else family.domain[1]
        for ax, (words, image) in zip(row, images, strict=True):
            draw_image(
                ax,
                image,
                (low, high, *above),
                FIELD_COLOURS,
                norm,
                label(next(iter(family.channels))) if ax is row[-1] else "",
            )
            ax.set(xlabel=label("x"), ylabel=label("time t" if dims == 1 else "y"))
            ax.set_title(words, fontsize=8)
            ax.label_outer()
    looks = {"published": {"color": style.BLACK, "linewidth": 2}, "generated": {"color": style.VERMILLION}}
    for name, values in fields.items():
        for frame, dash in {0: ":", values.shape[1] - 1: "-"}.items():
            number, energy = energy_spectrum(torch.from_numpy(values[:, frame : frame + 1, :1]))
            when = name if values.shape[1] == 1 else f"{name}, t = {pair[name].times[frame]:.3g}"
            curve.plot(number[1:], energy.mean(dim=(0, 1, 2))[1:], linestyle=dash, label=when, **looks[name])
    curve.set(
        xscale="log", yscale="log", ylim=(max(curve.dataLim.y0, 1e-9 * curve.dataLim.y1) / 2, 2 * curve.dataLim.y1)
    )
    curve.set(xlabel=label("wavenumber k", "cycles per domain"), ylabel=label("energy, mean over samples"))
    legend(curve, 1)
    return figure


def compare(name: str, file: Path | None, folder: Path) -> dict:
    """One family's figure, saved, and its numbers."""
    family, pair, settings = FAMILIES[name], {}, (FAMILIES[name].parameters,)
    if file is not None:
        pair["published"] = published = open_source(name, file, num_samples=MOST_SAMPLES)
        parameters = {key: float(value) for key, value in zip(family.parameters, published.parameters[0], strict=True)}
        settings = parameters, published.grid_shape[0], published.num_times
    began = time.process_time()
    with tempfile.TemporaryDirectory() as temporary:
        num_samples = max(3, published.num_samples) if pair else 3
        made = generate(family, Path(temporary) / (file.name if pair else f"{name}.h5"), num_samples, *settings)
        spent = time.process_time() - began
        pair["generated"] = open_source(name, made)
        fields = {which: source.read_all()[1] for which, source in pair.items()}
    words = ", ".join([family.title, *(f"{key} {value:g}" for key, value in settings[0].items())])
    shown = "published flows above, generated ones below, and their spectra" if file else "generated, and its spectrum"
    style.save(side_by_side(pair, fields, f"{words}: {shown}"), folder, name)
    found = {
        "file": file.name if file else None,
        "grid": list(pair["generated"].grid_shape),
        "frames": pair["generated"].num_times,
        "cpu_s_per_sample": round(spent / num_samples, 3),
        **{which: sizes(values, family.channels) for which, values in fields.items()},
    }
    if file and name in STARTED:
        found["from_first_frame"] = gone_on_with(published, fields["published"], parameters)
    return found


def main() -> None:
    parser = arguments(__doc__, "families")
    parser.add_argument("folder", type=Path, help="where PDEBench's small files are")
    parser.add_argument("--only", nargs="*", default=list(FAMILIES), help="families; what is known of others stays")
    args = parser.parse_args()
    path = args.output / "families.json"
    families = json.loads(path.read_text())["families"] if path.is_file() else {}
    for name in args.only:
        files = sorted(args.folder.glob(f"{FAMILIES[name].file_stem}*"))
        families[name] = compare(name, files[0] if files else None, args.output)
    save({"families": dict(sorted(families.items()))}, path)


if __name__ == "__main__":
    main()
