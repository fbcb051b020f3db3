"""Prediction from outside: the same answer however it is asked for, and a sentence for what cannot be answered."""

import warnings

import numpy as np
import pytest
import torch

from upsnb.config import ModelConfig
from upsnb.errors import DataError
from upsnb.models import fno, wrapped
from upsnb.models.geometry import grid_points
from upsnb.models.inference import AT_ONCE, predict

TRAINED = {"parameter_low": (0.2,), "parameter_high": (0.7,)}
ONE_VALUE = {"parameter_low": (0.4,), "parameter_high": (0.4,)}
POOLED = {"encoder": "perceiver", "decoder": "cross_attention"}
OPERATORS = [
    {},
    {"decoder": "unpatchify"},
    {"decoder": "cross_attention"},
    POOLED,
    {"walls": "free"},
    {"fourier_modes": 4},
]


@pytest.fixture
def model(make_spec, make_model):
    """Both equations: two frames to two on 32 points, and a static field on 16 x 16; beta from 0.2 to 0.7."""
    return make_model([make_spec("advection1d", **TRAINED), make_spec("darcy2d", **TRAINED)])


@pytest.fixture
def waves(make_spec, make_model):
    """One equation, trained on beta = 0.4 alone; what comes out is of the kind that goes in."""
    return make_model([make_spec("advection1d", **ONE_VALUE, output_mean=(0.3,), output_std=(0.7,))])


def frames(*shape) -> np.ndarray:
    return np.random.default_rng(0).normal(0.3, 0.7, shape).astype(np.float32)


# -- the same answer -----------------------------------------------------------------------------------------------


def test_the_answer_is_the_models_own_in_physical_units(model):
    x, beta = torch.from_numpy(frames(3, 2, 1, 32)), torch.tensor([[0.3], [0.4], [0.5]])
    with torch.no_grad():
        expected = model("advection", x, beta, model.specs["advection"].dt)
    torch.testing.assert_close(predict(model, x, "advection", beta), expected)
    y = torch.from_numpy(frames(2, 1, 1, 16, 16))
    with torch.no_grad():
        expected = model("darcy", y, torch.full((2, 1), 0.4), 0.0)
    torch.testing.assert_close(predict(model, y, "darcy", 0.4), expected)


def test_a_batch_is_its_samples_whatever_they_are_called_with(waves):
    x = frames(AT_ONCE + 3, 2, 1, 32)
    batch = predict(waves, x)
    assert batch.shape == x.shape and batch.dtype == np.float32
    for sample in (0, AT_ONCE, AT_ONCE + 2):
        alone = predict(waves, x[sample])
        assert alone.shape == x[sample].shape
        np.testing.assert_allclose(alone, batch[sample], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", [
    lambda x: x.astype(np.float64), lambda x: x.astype(">f8"), lambda x: np.asfortranarray(x), lambda x: x.tolist(),
    lambda x: x[..., ::-1].copy()[..., ::-1], torch.from_numpy, lambda x: torch.tensor(x, requires_grad=True),
    lambda x: torch.tensor(x, dtype=torch.float64),
])  # fmt: skip
def test_every_kind_of_numbers_gives_the_same_answer_of_its_own_kind(waves, kind):
    x = frames(2, 2, 1, 32)
    x.flags.writeable = False
    given = kind(x.copy() if kind is torch.from_numpy else x)
    answer = predict(waves, given)
    assert isinstance(answer, torch.Tensor) == isinstance(given, torch.Tensor)
    np.testing.assert_allclose(np.asarray(answer), predict(waves, x), rtol=1e-5, atol=1e-6)
    assert not getattr(answer, "requires_grad", False)


def test_whole_numbers_are_numbers(waves):
    ones = predict(waves, np.ones((2, 1, 32), dtype=np.uint8))
    np.testing.assert_array_equal(ones, predict(waves, np.ones((2, 1, 32))))


def test_parameters_may_be_given_once_or_for_each_sample(model):
    x = frames(3, 2, 1, 32)
    once = predict(model, x, "advection", 0.4)
    for same in ([0.4], [0.4, 0.4, 0.4], [[0.4]] * 3, torch.tensor(0.4), np.float64(0.4)):
        np.testing.assert_array_equal(predict(model, x, "advection", same), once)
    each = predict(model, x, "advection", [0.3, 0.4, 0.5])
    np.testing.assert_allclose(each[1], once[1], rtol=1e-4, atol=1e-5)
    assert not np.allclose(each[0], once[0])


def test_forecasts_are_fed_back_for_as_long_as_is_asked(waves):
    x = torch.from_numpy(frames(2, 5, 1, 32))
    long = predict(waves, x, num_frames=5)
    assert long.shape == (2, 5, 1, 32)
    first = predict(waves, x[:, -2:])
    torch.testing.assert_close(long[:, :2], first, msg="only the last input_frames count")
    torch.testing.assert_close(long[:, 2:4], predict(waves, first))
    torch.testing.assert_close(predict(waves, x, num_frames=1), first[:, :1])


@pytest.mark.parametrize("operator", OPERATORS, ids=str)
@pytest.mark.parametrize("shape", [(1,), (2,), (7,), (48,), (64,), (100,), (1, 1), (3, 5), (8, 16), (17, 40)])
def test_any_resolution_is_taken(make_spec, make_model, operator, shape):
    family = ("advection1d", "darcy2d")[len(shape) - 1]
    spec = make_spec(family, **ONE_VALUE)
    answer = predict(make_model([spec], **operator), frames(spec.input_frames, 1, *shape))
    assert answer.shape == (spec.output_frames, 1, *shape) and np.isfinite(answer).all()


@pytest.mark.parametrize("operator", OPERATORS)
@pytest.mark.parametrize(("dataset", "shape"), [("advection", (3, 1, 32)), ("darcy", (1, 1, 16, 16))])
def test_at_the_cells_of_the_grid_points_say_what_the_grid_says(make_spec, make_model, operator, dataset, shape):
    model = make_model([make_spec("advection1d", **TRAINED), make_spec("darcy2d", **TRAINED)], **operator)
    x = frames(AT_ONCE + 2, *shape)
    cells = grid_points(shape[2:])
    on_grid = predict(model, x, dataset, 0.4)
    at_points = predict(model, x, dataset, 0.4, points=cells.numpy())
    np.testing.assert_allclose(at_points, on_grid.reshape(*on_grid.shape[:3], -1), rtol=1e-4, atol=1e-5)
    one = predict(model, torch.from_numpy(x[0]), dataset, 0.4, num_frames=1, points=cells[3:5])
    np.testing.assert_allclose(one, at_points[0, :1, :, 3:5], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("points", "more", "said"),
    [
        ([[0.5, 0.5]], {}, r"got shape \(1, 2\) -> give \(points, 1\)"),
        ([0.5], {}, r"got shape \(1,\)"),
        ([[1.2]], {}, "outside of 0 to 1"),
        ([[np.nan]], {}, "outside of 0 to 1"),
        ([["left"]], {}, "give real numbers"),
        ([[0.5]], {"num_frames": 5}, "ask for 2 frames at most"),
    ],
)
def test_points_that_cannot_be_asked_for_are_said(waves, points, more, said):
    with pytest.raises(DataError, match=f"points: .*{said}"):
        predict(waves, frames(1, 2, 1, 32), points=points, **more)


def test_a_model_of_grids_says_that_it_has_no_points(make_spec):
    specs = {"advection": make_spec("advection1d", **ONE_VALUE)}
    model = wrapped.Wrapped(specs, fno.FNO, ModelConfig(settings={"width": 4, "modes": 4, "depth": 1}))
    with pytest.raises(DataError, match="points: .* answers on the grid"):
        predict(model, frames(1, 2, 1, 32), points=[[0.5]])


@pytest.mark.parametrize(("family", "smallest"), [("advection1d", (30,)), ("darcy2d", (16, 14))])
def test_a_resolution_that_a_model_cannot_take_is_said(make_spec, family, smallest):
    spec = make_spec(family, **ONE_VALUE)
    model = wrapped.Wrapped({spec.name: spec}, fno.FNO, ModelConfig(settings={"width": 4, "modes": 16, "depth": 1}))
    assert predict(model, frames(spec.input_frames, 1, *smallest)).shape[-len(smallest) :] == smallest
    for axis in range(len(smallest)):
        small = tuple(size - (number == axis) for number, size in enumerate(smallest))
        needed = f"at least {' x '.join(map(str, smallest))} points"
        with pytest.raises(DataError, match=needed):
            predict(model, frames(spec.input_frames, 1, *small))


# -- what is refused -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("shape", "dataset"), [
    ((2, 32), "advection"), ((32,), "advection"), ((), "advection"), ((1, 1, 32), "advection"),
    ((2, 2, 32), "advection"), ((0, 2, 1, 32), "advection"), ((2, 1, 0), "advection"),
    ((1, 1, 1, 2, 1, 32), "advection"),
    ((16, 16), "darcy"), ((1, 16, 16), "darcy"), ((2, 1, 16, 16), "darcy"), ((1, 2, 16, 16), "darcy"),
])  # fmt: skip
def test_a_wrong_shape_is_answered_with_the_right_one(model, shape, dataset):
    right = {"advection": "(samples, 2 or more frames, 1 channel, x)", "darcy": "(samples, 1 frame, 1 channel, x, y)"}
    with pytest.raises(DataError) as caught:
        predict(model, np.zeros(shape), dataset, 0.4)
    assert f"got shape {shape} -> {dataset} needs {right[dataset]}" in str(caught.value)


@pytest.mark.parametrize(("changes", "expected"), [
    ({"fields": np.zeros((2, 1, 32), bool)}, "fields: got bool -> give real numbers"),
    ({"fields": np.zeros((2, 1, 32), complex)}, "fields: got complex128"),
    ({"fields": torch.zeros((2, 1, 32), dtype=torch.bool)}, "fields: got bool"),
    ({"fields": torch.zeros((2, 1, 32), dtype=torch.complex64)}, "fields: got complex64"),
    ({"fields": "waves"}, "fields: got <U5"),
    ({"fields": None}, "fields: got object"),
    ({"fields": [[1.0], [1.0, 2.0]]}, "fields: cannot be made an array"),
    ({"fields": np.full((2, 1, 32), 1e300)}, "NaN, infinite or beyond float32 in sample 0, frame 0"),
    ({"fields": np.where(np.arange(96).reshape(3, 1, 32) == 70, np.nan, 0.0)}, "in sample 0, frame 2"),
    ({"dataset": None}, "dataset: the model was trained on advection, darcy -> name one"),
    ({"dataset": "advektion"}, "dataset: 'advektion' is not what the model was trained on -> did you mean advection?"),
    ({"parameters": None}, "training saw more than one value -> give beta"),
    ({"parameters": [0.3, 0.4]}, "parameters: got shape (2,) for 1 sample -> give beta"),
    ({"parameters": np.nan}, "parameters: got [nan] -> give finite values of beta"),
    ({"parameters": "0.4"}, "parameters: got <U3"),
    ({"num_frames": 0}, "num_frames: got 0 -> give 1 or more"),
    ({"num_frames": 2.0}, "num_frames: got 2.0 -> give 1 or more"),
    ({"fields": np.zeros((1, 16, 16))[None], "dataset": "darcy", "num_frames": 2}, "darcy does not change in time"),
])  # fmt: skip
def test_what_cannot_be_predicted_from_is_said_in_one_sentence(model, changes, expected):
    asked = {"fields": np.zeros((2, 1, 32)), "dataset": "advection", "parameters": 0.4, **changes}
    with pytest.raises(DataError) as caught:
        predict(model, **asked)
    assert expected in str(caught.value) and "\n" not in str(caught.value)


# -- what is said --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("beta", "outside"), [(0.2, False), (np.float32(0.7), False), (0.71, True), (-1.0, True)])
def test_a_parameter_outside_of_what_was_trained_is_said(model, beta, outside):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        predict(model, frames(2, 1, 32), "advection", beta)
    said = [str(warning.message) for warning in caught]
    trained = "and advection was trained on 0.2 to 0.7 -> take the answer for a guess"
    assert said == ([f"parameters: beta = {beta:.4g}, {trained}"] if outside else [])


def test_fields_in_other_units_are_said(waves):
    with pytest.warns(UserWarning, match="channel 0 is up to .* standard deviations .* physical units"):
        predict(waves, 1000 * frames(2, 1, 32))
