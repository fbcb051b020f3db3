"""A trained model asked from outside: what it is given is checked, and both sides speak physical units."""

from __future__ import annotations

import warnings

import numpy as np
import torch
from torch import Tensor

from upsnb.data.spec import DatasetSpec
from upsnb.errors import DataError
from upsnb.models.surrogate import Surrogate
from upsnb.rules import did_you_mean

AT_ONCE = 32  # forecasts in one call of the model
FAR = 10.0  # standard deviations from the training mean that no field of the same units reaches


def predict(
    model: Surrogate,
    fields,
    dataset: str | None = None,
    parameters=None,
    num_frames: int | None = None,
    members: int | None = None,
    seed: int = 0,
    points=None,
) -> np.ndarray | Tensor:
    """What follows the given frames, or belongs to the given field, in physical units.

    Args:
        fields: (B, T, C, *grid), or (T, C, *grid) for one sample; real numbers of any type, a NumPy array, a tensor or
            lists. T is at least input_frames, of which the last ones count, with the training data's time between them;
            1 where nothing changes in time. The grid holds cell centres of the whole domain, at any resolution.
        dataset: whose equation it is, one of `model.specs`; may be left out where there is only one.
        parameters: of the equation: one number, (P,) for all samples or (B, P); may be left out where there was only
            one value to train on.
        num_frames: to predict, each call fed with the forecast before it; None: as many as one call gives.
        members: forecasts of each sample that are drawn, by a model of a stage that draws; None: one, its middle.
        seed: of what is drawn; the same seed gives the same members.
        points: (Q, S) to predict at instead of the grid, in lengths of the domain, 0 to 1 along each of its S axes; of
            models that answer anywhere, in one call.
    Returns:
        (B, num_frames, C_out, *grid) float32, or (..., Q) at points, without B for one sample, and (members, ...) of
        those; a tensor, on its device, if one was given.
    Raises:
        DataError: what cannot be predicted from, with what was found and what to do.
    Warns:
        UserWarning: fields or parameters are far from what was trained on, so the answer is a guess.
    """
    name = _name(model, dataset)
    spec, given = model.specs[name], _numbers("fields", fields)
    single = given.dim() == spec.num_dims + 2
    x = given[None] if single else given
    _check_shape(model, spec, tuple(given.shape), x)
    if not x.isfinite().all():
        sample, frame = (~x.isfinite()).nonzero()[0, :2].tolist()
        raise DataError(f"fields: NaN, infinite or beyond float32 in sample {sample}, frame {frame} -> leave it out")
    values = _parameters(spec, parameters, len(x))
    if num_frames is None:
        num_frames = spec.output_frames
    elif not isinstance(num_frames, int | np.integer) or num_frames < 1 or (num_frames > 1 and not spec.time_dependent):
        most = "" if spec.time_dependent else f", {name} does not change in time"
        raise DataError(f"num_frames: got {num_frames!r}{most} -> give {'1 or more' if spec.time_dependent else '1'}")
    if members is not None and (not isinstance(members, int | np.integer) or members < 1 or not model.draws):
        found = f"got {members!r}" if model.draws else f"{model.called} draws nothing"
        remedy = "give 1 or more" if model.draws else "train a stage that draws (stages.crps), or leave members out"
        raise DataError(f"members: {found} -> {remedy}")
    places = None if points is None else _places(model, spec, points, num_frames, members)
    for said in (*_far_fields(spec, x), *_far_parameters(spec, values)):
        warnings.warn(f"{said} -> take the answer for a guess", stacklevel=3)  # where Run.predict was called
    device, parts = next(model.parameters()).device, []
    with torch.no_grad():
        at_once = max(1, AT_ONCE // (members or 1))
        for part, of_part, numbers in zip(*(some.split(at_once) for some in (x, values, torch.arange(len(x))))):
            asked = name, part.to(device), of_part.to(device), spec.dt, int(num_frames)
            if places is not None:
                drawn = model(name, part[:, -spec.input_frames :].to(device), *asked[2:4], places.to(device))[
                    :, :num_frames
                ]
            else:
                drawn = model.rollout(*asked) if members is None else model.ensemble(*asked, members, numbers, seed)
            parts.append(drawn.to(given.device))
    answer = torch.cat(parts, dim=0 if members is None else 1)
    answer = answer.select(0 if members is None else 1, 0) if single else answer
    return answer if isinstance(fields, Tensor) else answer.numpy()


def _name(model: Surrogate, dataset: str | None) -> str:
    known = ", ".join(model.specs)
    if dataset is None and len(model.specs) == 1:
        return next(iter(model.specs))
    if dataset is None:
        raise DataError(f"dataset: the model was trained on {known} -> name one of them")
    if dataset not in model.specs:
        raise DataError(f"dataset: {dataset!r} is not what the model was trained on -> "
                        f"{did_you_mean(str(dataset), model.specs)}")  # fmt: skip
    return dataset


def _numbers(what: str, given) -> Tensor:
    """As float32, without a gradient, where they are."""
    if isinstance(given, Tensor):
        if given.is_complex() or given.dtype == torch.bool:
            raise DataError(f"{what}: got {str(given.dtype).removeprefix('torch.')} -> give real numbers")
        return given.detach().float()
    try:
        array = np.asarray(given)
    except ValueError as error:  # lists of different lengths
        raise DataError(f"{what}: cannot be made an array ({error}) -> give rows of one length") from None
    if array.dtype.kind not in "fiu":
        raise DataError(f"{what}: got {array.dtype} -> give real numbers")
    with np.errstate(over="ignore"):  # what is beyond float32 becomes infinite, and is refused
        return torch.from_numpy(np.array(array, dtype=np.float32))  # a copy: theirs may be read-only or reversed


def _check_shape(model: Surrogate, spec: DatasetSpec, found: tuple[int, ...], x: Tensor) -> None:
    least, axes = spec.input_frames, ", ".join("xyz"[: spec.num_dims])
    frames = f"{least}{' or more' * spec.time_dependent} frame{'s' * (least > 1)}"
    shape = f"(samples, {frames}, {spec.input_channels} channel{'s' * (spec.input_channels > 1)}, {axes})"
    if x.dim() == spec.num_dims + 3 and 0 not in x.shape:
        right = x.shape[1] >= least if spec.time_dependent else x.shape[1] == least
        if right and x.shape[2] == spec.input_channels:
            why = model.refuses(spec.name, tuple(x.shape[3:]))
            if not why:
                return
            raise DataError(f"fields: got a grid of {' x '.join(map(str, x.shape[3:]))} -> {why}")
    raise DataError(f"fields: got shape {found} -> {spec.name} needs {shape}; one sample may leave out the first")


def _parameters(spec: DatasetSpec, given, count: int) -> Tensor:
    """(B, P) float32, one row a sample."""
    names = ", ".join(spec.parameter_names)
    if given is None:
        if spec.num_parameters and (not spec.parameter_low or spec.parameter_low != spec.parameter_high):
            raise DataError(f"parameters: none was given, and training saw more than one value -> give {names}")
        return torch.tensor([spec.parameter_low], dtype=torch.float32).expand(count, spec.num_parameters)
    values = torch.atleast_1d(_numbers("parameters", given))
    if spec.num_parameters == 1 and values.shape == (count,):
        values = values[:, None]
    if values.shape not in ((spec.num_parameters,), (count, spec.num_parameters)):
        found = f"got shape {tuple(values.shape)} for {count} sample{'s' * (count > 1)}"
        raise DataError(f"parameters: {found} -> give {names or 'none'}, once for all samples or once for each")
    if not values.isfinite().all():
        raise DataError(f"parameters: got {values.flatten().tolist()[:8]} -> give finite values of {names}")
    return values.expand(count, spec.num_parameters)


def _places(model: Surrogate, spec: DatasetSpec, given, num_frames: int, members: int | None) -> Tensor:
    """(Q, S) float32."""
    if not model.any_points:
        raise DataError(f"points: {model.called} answers on the grid that it is given -> leave them out")
    if num_frames > spec.output_frames or members is not None:
        raise DataError(
            f"points: {num_frames} frames or an ensemble take several calls, which are fed with whole grids -> leave "
            f"members out, and ask for {spec.output_frames} frames at most; forecast the frames before on the grid"
        )
    places = _numbers("points", given)
    if places.dim() != 2 or places.shape[1] != spec.num_dims or not len(places):
        raise DataError(f"points: got shape {tuple(places.shape)} -> give (points, {spec.num_dims})")
    if not ((places >= 0) & (places <= 1)).all():  # NaN is neither
        raise DataError("points: some lie outside of 0 to 1 -> give shares of the domain's length along each axis")
    return places


def _far_fields(spec: DatasetSpec, x: Tensor) -> list[str]:
    mean, std = (torch.tensor(values, device=x.device) for values in (spec.input_mean, spec.input_std))
    far = (x.transpose(1, 2).flatten(2) - mean[:, None]).abs().amax(dim=(0, 2)) / std
    return [
        f"fields: channel {channel} is up to {distance:.3g} standard deviations from the mean of the training data, "
        f"{mean[channel]:.3g} (are these its physical units?)"
        for channel, distance in enumerate(far.tolist())
        if distance > FAR
    ]


def _far_parameters(spec: DatasetSpec, values: Tensor) -> list[str]:
    names, said = spec.parameter_names, []
    for name, column, low, high in zip(names, values.T, spec.parameter_low, spec.parameter_high):
        rounding = 1e-5 * max(abs(low), abs(high))
        outside = column[(column < low - rounding) | (column > high + rounding)]
        if len(outside):
            trained = f"{low:.4g}" if low == high else f"{low:.4g} to {high:.4g}"
            said.append(f"parameters: {name} = {float(outside[0]):.4g}, and {spec.name} was trained on {trained}")
    return said
