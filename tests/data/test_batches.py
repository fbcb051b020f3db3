"""Which pairs are trained on: all of them, once, whatever the ranks, restarts and loaders; and true symmetries only."""

import dataclasses
import math
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch

from upsnb import hardware
from upsnb.data import batches, datasets, symmetries
from upsnb.data.batch import Batch
from upsnb.data.batches import Loader, Schedule
from upsnb.data.datasets import generated_path, open_dataset
from upsnb.data.families import FAMILIES
from upsnb.errors import DataError
from upsnb.solvers import darcy, waves
from upsnb.training.parallel import Ranks
from upsnb.training.setup import Setup


@pytest.fixture
def opened(tiny_config, data_root):
    """`opened(**overlay)`: a tiny config and its datasets."""

    def make(names=("advection", "darcy"), **overlay):
        config = tiny_config(names, **overlay)
        return config, {name: open_dataset(name, config, data_root) for name in config.data.datasets}

    return make


def rows(microbatches):
    """Every pair of some microbatches as (dataset, sample, first frame)."""
    return [(m.dataset, *map(int, pair)) for m in microbatches for pair in m.pairs]


def same(first, second):
    return len(first) == len(second) and all(
        a.dataset == b.dataset
        and a.seed == b.seed
        and np.array_equal(a.pairs, b.pairs)
        and np.array_equal(a.draws, b.draws)
        for a, b in zip(first, second)
    )


# -- order -------------------------------------------------------------------------------------------------------------


def test_the_order_is_a_function_of_seed_epoch_and_rank(opened):
    config, datasets = opened(**{"training.batch_size": 4})
    first, again = (Schedule(datasets, config, 1, 2) for _ in range(2))
    again.epoch(3)  # what was asked before does not matter
    assert same(first.epoch(1), again.epoch(1))
    assert not same(first.epoch(1), first.epoch(2))
    assert not same(first.epoch(1), Schedule(datasets, config, 0, 2).epoch(1))
    other, _ = opened(**{"training.batch_size": 4, "training.seed": 43})
    assert not same(first.epoch(1), Schedule(datasets, other, 1, 2).epoch(1))


def test_ranks_are_disjoint_and_cover_every_pair_of_the_largest_dataset(opened):
    config, datasets = opened(**{"training.batch_size": 4})
    schedules = [Schedule(datasets, config, rank, 4) for rank in range(4)]
    seen = [row for schedule in schedules for row in rows(schedule.epoch(0)) if row[0] == "advection"]
    expected = {("advection", *map(int, pair)) for pair in datasets["advection"].pairs("train")}
    assert len(seen) == len(set(seen)) and set(seen) == expected


def test_the_tail_that_fills_no_microbatch_is_another_one_each_epoch(opened):
    config, datasets = opened(("advection",), **{"training.batch_size": 7})
    schedule = Schedule(datasets, config, 0, 1)
    expected = {("advection", *map(int, pair)) for pair in datasets["advection"].pairs("train")}
    missed = [frozenset(expected - set(rows(schedule.epoch(epoch)))) for epoch in range(4)]
    assert all(len(rest) == len(expected) % 7 > 0 for rest in missed) and len(set(missed)) > 1


def test_any_number_of_ranks_makes_the_same_global_microbatches(opened):
    unions = []
    for num_ranks in (1, 2, 4):
        config, datasets = opened(**{"training.batch_size": 8 // num_ranks})
        parts = [Schedule(datasets, config, rank, num_ranks).epoch(2) for rank in range(num_ranks)]
        unions.append([(m[0].dataset, m[0].seed, np.concatenate([p.pairs for p in m]).tolist()) for m in zip(*parts)])
    assert unions[0] == unions[1] == unions[2]


def test_an_epoch_resumes_in_its_middle(opened):
    config, datasets = opened()
    schedule = Schedule(datasets, config, 0, 1)
    for start in (0, 1, 7, schedule.num_microbatches):
        assert same(schedule.epoch(1)[start:], schedule.epoch(1, start))


def test_datasets_take_equal_turns_and_the_small_one_is_reshuffled(opened):
    config, datasets = opened()
    schedule = Schedule(datasets, config, 0, 1)
    epoch = schedule.epoch(0)
    assert [m.dataset for m in epoch] == ["advection", "darcy"] * schedule.per_dataset
    darcy = [m for m in epoch if m.dataset == "darcy"]
    per_pass = len(datasets["darcy"].pairs("train")) // 8
    passes = [rows(darcy[i : i + per_pass]) for i in range(0, len(darcy), per_pass)]
    assert len(passes) > 2 and all(len(set(part)) == len(part) for part in passes)
    assert len({tuple(part) for part in passes}) == len(passes)
    counts = np.bincount([row[1] for row in rows(darcy)])
    assert counts.max() - counts[counts > 0].min() <= 1


def test_seeds_of_microbatches_differ(opened):
    config, datasets = opened()
    schedule = Schedule(datasets, config, 0, 1)
    seeds = [m.seed for epoch in range(3) for m in schedule.epoch(epoch)]
    assert len(set(seeds)) == len(seeds)


def test_batch_size_counts_pairs_and_not_trajectories(opened):
    config, datasets = opened(**{"training.batch_size": 6})
    advection = datasets["advection"]
    starts = len(advection.frames) - advection.spec.input_frames - advection.spec.output_frames + 1
    assert len(advection.pairs("train")) == len(advection.splits["train"]) * starts > len(advection.splits["train"])
    loader = Loader(datasets, config, 0, 1, "cpu")
    for batch in list(loader.epoch(0))[:4]:
        assert len(batch.inputs) == len(batch.targets) == len(batch.parameters) == 6


def test_pairs_come_from_the_training_split_and_stay_inside_the_trajectory(opened):
    config, datasets = opened(**{"training.lambda_rollout": 0.1})
    schedule, advection = Schedule(datasets, config, 0, 1), datasets["advection"]
    length = advection.spec.input_frames + 2 * advection.spec.output_frames
    for name, sample, first in rows(schedule.epoch(0)):
        assert sample in datasets[name].splits["train"]
        assert name == "darcy" or first + length <= len(advection.frames)
    for batch in list(Loader(datasets, config, 0, 1, "cpu").epoch(0))[:2]:
        assert batch.targets.shape[1] == (1 if batch.dataset == "darcy" else 4)


def test_too_few_pairs_for_one_microbatch_is_an_error(opened):
    config, datasets = opened(**{"training.batch_size": 9})
    Schedule(datasets, config, 0, 1)
    with pytest.raises(DataError, match=r"darcy has 16 training pairs.*18 \(2 x training.batch_size 9\).*lower"):
        Schedule(datasets, config, 0, 2)


def test_too_few_microbatches_for_one_step_is_an_error(opened):
    config, datasets = opened(("darcy",), **{"training.batch_size": 4, "training.accum_steps": 5})
    with pytest.raises(DataError, match=r"training.accum_steps 5.*4 microbatches.*lower"):
        Schedule(datasets, config, 0, 1)


# -- mixing ------------------------------------------------------------------------------------------------------------

LOSSES = {"advection": 0.01, "darcy": 0.04}


def names_of(schedule, epoch=0, losses=None):
    return [microbatch.dataset for microbatch in schedule.epoch(epoch, 0, losses)]


def mixed(opened, rank=0, ranks=1, **mixing):
    config, datasets = opened(
        **{f"data.mixing.{key}": value for key, value in mixing.items()}, **{"stages.operator.epochs": 4}
    )
    return Schedule(datasets, config, rank, ranks)


@pytest.mark.parametrize(
    ("by", "losses", "count"),  # 160 pairs of advection, 16 of Darcy flow
    [
        ("size", {}, 4),  # of 40: one in eleven
        ("loss", {}, 20),  # before the first validation
        ("loss", LOSSES, 29),  # three quarters by loss, one in equal shares
        ("loss", {"advection": 1e-9, "darcy": 1.0}, 35),  # none gets less than a quarter of an equal share
        ("loss", {"advection": 1.0, "darcy": 1e9}, 20),  # worse than nothing is no worse than that
        ("loss", {"advection": math.inf, "darcy": math.nan}, 20),
    ],
)
def test_datasets_get_turns_by_their_size_or_by_their_loss(opened, by, losses, count):
    schedule = mixed(opened, by=by)
    names = names_of(schedule, 1, losses)
    assert (len(names), names.count("darcy")) == (40, count)
    for length in range(40):  # evenly: any row of steps is mixed as the epoch is
        assert abs(names[:length].count("darcy") - length * count / 40) <= 1


def test_a_dataset_joins_in_its_epoch_and_every_epoch_has_as_many_microbatches(opened):
    schedule = mixed(opened, from_epoch={"darcy": 2})
    assert [names_of(schedule, epoch).count("darcy") for epoch in range(4)] == [0, 0, 20, 20]
    assert {len(names_of(schedule, epoch)) for epoch in range(4)} == {40}
    twice = np.unique(rows(schedule.epoch(0)), axis=0, return_counts=True)[1]
    assert len(twice) == 160 and set(twice) == {2}  # the other one is visited as often again, pair by pair
    assert same(schedule.epoch(2), mixed(opened).epoch(2))


def test_a_mixture_is_the_same_on_all_ranks_and_goes_on_in_its_middle(opened):
    parts = [mixed(opened, rank, 2, by="loss").epoch(1, 0, LOSSES) for rank in range(2)]
    assert [(m.dataset, m.seed, m.turn) for m in parts[0]] == [(m.dataset, m.seed, m.turn) for m in parts[1]]
    assert not same(*parts)
    assert same(parts[0][7:], mixed(opened, 0, 2, by="loss").epoch(1, 7, LOSSES))


def test_losses_are_due_by_turns_of_each_dataset(opened):
    for schedule in (mixed(opened), mixed(opened, by="size")):
        for name in ("advection", "darcy"):
            turns = [m.turn for m in schedule.epoch(0) if m.dataset == name]
            assert turns == list(range(len(turns)))


# -- reading -----------------------------------------------------------------------------------------------------------


def expect_equal(first: Batch, second: Batch):
    assert first.dataset == second.dataset and first.seed == second.seed
    for key in ("inputs", "targets", "parameters"):
        one, other = getattr(first, key), getattr(second, key)
        assert one.dtype == other.dtype == torch.float32 and torch.equal(one, other), key


@pytest.mark.parametrize("num_workers", (0, 2))
def test_workers_read_exactly_what_is_resident(opened, num_workers):
    settings = {"training.lambda_rollout": 0.1, "data.datasets.advection.augment": True}
    settings |= {"data.datasets.darcy.augment": True, "training.time_stride": 2, "training.batch_size": 2}
    settings |= {
        "data.datasets.advection.generate.num_times": 25,
        "data.datasets.advection.input_frames": 1,
        "data.datasets.advection.output_frames": 1,
    }
    found = {}
    for residency in ("device", "workers"):
        workers = num_workers if residency == "workers" else 0
        config, datasets = opened(**settings, **{"data.residency": residency, "training.num_workers": workers})
        loader = Loader(datasets, config, 0, 1, "cpu")
        assert loader.residency == residency and (loader.reader.fields is None) == (residency == "workers")
        found[residency] = list(loader.epoch(0, loader.schedule.num_microbatches - 6))
    assert len(found["device"]) == 6
    for first, second in zip(found["device"], found["workers"]):
        expect_equal(first, second)


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
def test_a_reading_process_begins_with_what_it_needs_imported(opened):
    config, datasets = opened(**{"data.residency": "workers", "training.num_workers": 1, "training.batch_size": 1})
    processes = Loader(datasets, config, 0, 1, "cpu")._workers.multiprocessing_context
    with processes.Pool(1) as pool:  # asked with a built-in function, which imports nothing
        assert pool.apply(eval, ("{'torch', 'upsnb.data.batches'} <= {*__import__('sys').modules}",))


@pytest.mark.parametrize(("num_workers", "ranks", "own"), [(12, 4, 3), (7, 2, 3), (1, 4, 1), (0, 4, 0), (6, 1, 6)])
def test_the_machine_s_reading_processes_are_shared_out_among_its_ranks(opened, num_workers, ranks, own):
    settings = {"training.num_workers": num_workers, "training.num_gpus": ranks, "training.batch_size": 1}
    config, datasets = opened(**settings, **{"data.residency": "workers"})
    assert [Loader(datasets, config, rank, ranks, "cpu")._workers.num_workers for rank in range(ranks)] == [own] * ranks


def test_reading_draws_nothing_from_the_global_random_state(opened):
    # A loader made in the middle of an epoch would otherwise change drop-path: resuming would not be the same run.
    config, datasets = opened(**{"data.residency": "workers"})
    before = torch.get_rng_state()
    next(Loader(datasets, config, 0, 1, "cpu").epoch(0))
    assert torch.equal(torch.get_rng_state(), before)


def test_batches_hold_the_file_s_own_values(opened):
    config, datasets = opened(**{"training.batch_size": 3})
    loader = Loader(datasets, config, 0, 1, "cpu")
    for microbatch, batch in list(zip(loader.schedule.epoch(0), loader.epoch(0)))[:2]:
        with h5py.File(datasets[batch.dataset].source.files[0]) as file:
            for row, (sample, first) in enumerate(microbatch.pairs):
                if batch.dataset == "darcy":
                    wanted = file["nu"][sample], file["tensor"][sample, 0]
                    found = batch.inputs[row, 0, 0], batch.targets[row, 0, 0]
                else:
                    wanted = file["tensor"][sample, first : first + 2], file["tensor"][sample, first + 2 : first + 4]
                    found = batch.inputs[row, :, 0], batch.targets[row, :, 0]
                assert all(np.array_equal(a, b.numpy()) for a, b in zip(wanted, found))


def test_augmenting_a_batch_leaves_the_resident_data_as_it_is(opened):
    config, datasets = opened(**{"data.datasets.advection.augment": True, "data.datasets.darcy.augment": True})
    loader = Loader(datasets, config, 0, 1, "cpu")
    before = {name: [x.clone() for x in fields] for name, fields in loader.reader.fields.items()}
    for batch in loader.epoch(0):
        batch.inputs.zero_(), batch.targets.zero_()
    for name, fields in loader.reader.fields.items():
        assert all(torch.equal(x, y) for x, y in zip(fields, before[name]))


def test_auto_keeps_small_data_on_the_device_and_reads_large_data(opened):
    for limit, expected in ((1.0, "device"), (1e-9, "workers")):
        config, datasets = opened(**{"data.max_resident_gib": limit})
        assert batches.residency(datasets, config) == expected


# -- symmetries --------------------------------------------------------------------------------------------------------


def augmented(family, inputs, targets, seed=3):
    draws = np.random.default_rng(seed).random((len(inputs), 2))
    images = symmetries.images(FAMILIES[family], inputs.clone(), targets.clone(), draws)
    return Batch("any", *images, torch.ones(len(inputs), 1), seed)


def test_an_augmented_wave_is_still_a_solution():
    beta, times = 0.4, np.arange(6) * 0.05
    drawn = waves.draw_waves(0, np.arange(12))
    x = (np.arange(64) + 0.5) / 64
    fields = torch.from_numpy(waves.advection_solution(drawn, beta, x, times)).float()[:, :, None]
    batch = augmented("advection1d", fields[:, :2], fields[:, 2:])
    together = torch.cat((batch.inputs, batch.targets), dim=1)
    assert not torch.equal(together, fields)
    shifts, signs = set(), set()
    for image, original in zip(together, fields):  # one and the same shift and sign for all frames
        images = [(n, s) for n in range(64) for s in (1.0, -1.0) if torch.equal(image, s * original.roll(n, -1))]
        assert images  # a single wave has several: half a length on is the other sign
        shifts.add(images[0][0]), signs.update(sign for _, sign in images[:1])
    assert len(shifts) > 6 and signs == {1.0, -1.0}


def test_an_augmented_wave_moves_as_the_equation_says():
    drawn = waves.draw_waves(1, np.arange(4))
    x, times = (np.arange(64) + 0.5) / 64, np.arange(3) / 16  # beta 0.5: two cells a frame
    fields = torch.from_numpy(waves.advection_solution(drawn, 0.5, x, times)).float()[:, :, None]
    batch = augmented("advection1d", fields[:, :1], fields[:, 1:])
    for frame in range(2):
        moved = batch.inputs[:, 0].roll(2 * (frame + 1), -1)
        torch.testing.assert_close(batch.targets[:, frame], moved, atol=1e-5, rtol=0)


def test_the_pressure_of_a_transformed_medium_is_the_transformed_pressure():
    nu = np.stack([darcy.draw_permeability(2, sample, 12) for sample in range(8)])
    pressure = np.stack([darcy.solve_darcy(field, 1.0) for field in nu])
    fields = [torch.from_numpy(x)[:, None, None] for x in (nu, pressure)]
    images = [symmetries.turn(FAMILIES["darcy2d"], x, ("any",), np.arange(8)) for x in fields]
    solved = np.stack([darcy.solve_darcy(image.numpy()[0, 0], 1.0) for image in images[0]])
    np.testing.assert_allclose(images[1][:, 0, 0].numpy(), solved, rtol=1e-9)


@pytest.mark.parametrize(("name", "count"), [("cfd1d", 2), ("cfd2d", 8), ("incompressible2d", 8), ("cfd3d", 48)])
def test_divergence_turns_with_velocity_and_every_turn_is_another_one_that_can_be_undone(name, count):
    """Components move and change sign as space does, so that what does not depend on directions stays the same."""
    family = FAMILIES[name]
    dims, channels = family.num_dims, family.input_channels
    assert symmetries.num_turns((6,) * dims) == count
    elements, generator = np.arange(count), torch.Generator().manual_seed(0)
    x = torch.randn(1, 1, len(channels), *(6,) * dims, generator=generator, dtype=torch.float64)
    x = x.repeat(count, *(1,) * (x.dim() - 1))
    turned = symmetries.turn(family, x, channels, elements)
    assert len({image.numpy().tobytes() for image in turned}) == count
    assert torch.equal(symmetries.turn(family, turned, channels, elements, back=True), x)

    def divergence(fields):
        parts = [fields[:, :, channels.index(name)] for name in family.vectors[0]]
        return sum(p.roll(-1, 2 + axis) - p.roll(1, 2 + axis) for axis, p in enumerate(parts))[:, :, None]

    of_scalars = symmetries.turn(family, divergence(x), ("divergence",), elements)
    torch.testing.assert_close(divergence(turned), of_scalars)


def test_a_gas_is_shifted_along_all_axes_by_numbers_of_its_own():
    x = torch.arange(6.0 * 7 * 8).reshape(1, 1, 1, 6, 7, 8).repeat(300, 1, 5, 1, 1, 1)
    family = dataclasses.replace(FAMILIES["cfd3d"], symmetries=("shift",))
    shifted, targets = symmetries.images(family, x, 2 * x, np.random.default_rng(0).random((300, 2)))
    assert torch.equal(targets, 2 * shifted)
    first = shifted[:, 0, 0, 0, 0, 0].long()
    moves = torch.stack((first // 56, first // 8 % 7, first % 8), dim=1)
    assert [len(set(column.tolist())) for column in moves.T] == [6, 7, 8]
    assert torch.equal(shifted[5, 0, 0].roll(tuple(moves[5].tolist()), (0, 1, 2)), x[5, 0, 0])


def test_augmentation_moves_inputs_and_targets_alike():
    nu = torch.randn(64, 1, 1, 6, 6)
    batch = augmented("darcy2d", nu, 2 * nu)
    assert torch.equal(batch.targets, 2 * batch.inputs)
    images = {(a == b).all().item() for a, b in zip(batch.inputs, nu)}
    assert images == {True, False}


@pytest.mark.parametrize("augment", [True, False])
@pytest.mark.parametrize("residency", ["device", "workers"])
def test_batches_lie_in_memory_alike_whatever_was_drawn(opened, augment, residency):
    """And as they are peeked at: a compiled graph is of one layout, and a second one would be compiled in mid-run."""
    settings = {f"data.datasets.{name}.augment": augment for name in ("advection", "darcy")}
    config, datasets = opened(**settings, **{"data.residency": residency, "training.batch_size": 2})
    loader, seen = Loader(datasets, config, 0, 1, "cpu"), {}
    for batch in (*loader.peek(), *loader.epoch(0)):
        seen.setdefault(batch.dataset, set()).add(tuple(x.stride() for x in batch.tensors().values()))
    assert [len(strides) for strides in seen.values()] == [1, 1]


def test_images_are_drawn_from_another_stream_than_the_order(opened, monkeypatch):
    # A tuple of seeds with a zero at its end is numpy's seed without it: order and image would come from the same bits.
    states, make = [], np.random.default_rng

    def noted(seed):
        generator = make(seed)
        states.append(generator.bit_generator.state["state"]["state"])
        return generator

    config, datasets = opened()
    monkeypatch.setattr(batches.np.random, "default_rng", noted)
    Schedule(datasets, config, 0, 1).epoch(0)
    assert len(states) > 4 and len(set(states)) == len(states)


@pytest.mark.parametrize("batch_size, num_ranks", [(4, 1), (2, 1), (2, 2), (2, 4)])
def test_a_step_sees_the_same_images_however_its_pairs_are_shared_out(opened, batch_size, num_ranks):
    settings = {"data.datasets.advection.augment": True, "data.datasets.darcy.augment": True}

    def stream(size, ranks):
        """All pairs of each dataset in the order of training."""
        config, datasets = opened(**settings, **{"training.batch_size": size})
        epochs = [list(Loader(datasets, config, rank, ranks, "cpu").epoch(1)) for rank in range(ranks)]
        return {
            name: torch.cat([b.inputs for batches in zip(*epochs) for b in batches if b.dataset == name])
            for name in datasets
        }

    for name, expected in stream(8, 1).items():
        assert torch.equal(stream(batch_size, num_ranks)[name][: len(expected)], expected), name


def test_only_datasets_that_ask_for_it_are_augmented(opened):
    plain_config, datasets = opened()
    config, others = opened(**{"data.datasets.darcy.augment": True})
    pairs = zip(Loader(datasets, plain_config, 0, 1, "cpu").epoch(0), Loader(others, config, 0, 1, "cpu").epoch(0))
    changed = {"advection": False, "darcy": False}
    for plain, image in list(pairs)[:8]:
        changed[plain.dataset] |= not torch.equal(plain.inputs, image.inputs)
    assert changed == {"advection": False, "darcy": True}


# -- statistics --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name, keys", [("advection", ("tensor",)), ("darcy", ("nu", "tensor"))])
def test_statistics_come_from_the_training_split_alone(opened, tmp_path, name, keys):
    config, datasets = opened((name,))
    dataset = datasets[name]
    path = generated_path(config.data.datasets[name], tmp_path)
    path.parent.mkdir(parents=True)
    path.write_bytes(dataset.source.files[0].read_bytes())
    held_out = np.sort(np.concatenate([dataset.splits["validation"], dataset.splits["test"]]))
    assert len(held_out) == 4
    with h5py.File(path, "r+") as file:
        for key in keys:
            values = file[key][...]
            values[held_out] *= 1.7
            file[key][...] = values
    assert open_dataset(name, config, tmp_path).spec == dataset.spec
    with h5py.File(path, "r+") as file:
        values = file[keys[-1]][...]
        values[dataset.splits["train"]] *= 1.7
        file[keys[-1]][...] = values
    assert open_dataset(name, config, tmp_path).spec != dataset.spec


def test_statistics_normalise_the_training_split(opened):
    _, datasets = opened()
    for dataset in datasets.values():
        spec = dataset.spec
        inputs, targets = dataset.source.read(dataset.splits["train"])
        for fields, mean, std in (
            (inputs, spec.input_mean, spec.input_std),
            (targets, spec.output_mean, spec.output_std),
        ):
            normalised = (fields.astype(np.float64) - mean[0]) / std[0]
            assert abs(normalised.mean()) < 1e-6 and abs(normalised.std() - 1) < 1e-6
        assert dataclasses.asdict(spec)["parameter_std"] == (1.0,)  # one single beta: nothing to scale by


def test_fewer_samples_than_were_asked_for_are_told(tiny_config):
    said: list[str] = []
    Setup.build(tiny_config(**{"data.datasets.darcy.num_samples": 300}), Path(), Ranks(), said.append)
    (line,) = said
    assert line.startswith("warning: data.datasets.darcy.num_samples: 300 were asked for and 2D_DarcyFlow")
    assert line.endswith("holds 20 -> all of them are taken")


@pytest.mark.parametrize("changes", [{"num_samples": 2**31 - 1}, {"resolution": 10**6}, {"num_times": 2**31 - 1}])
@pytest.mark.parametrize("name", ["advection", "darcy"])
def test_data_that_cannot_fit_are_refused_before_a_file_is_begun(tiny_config, tmp_path, name, changes):
    if name == "darcy" and "num_times" in changes:
        changes = {"num_samples": 10**9}
    config = tiny_config((name,)).data.datasets[name]
    huge = config.model_copy(update={"generate": config.generate.model_copy(update={"num_samples": 10**8} | changes)})
    with pytest.raises(DataError, match=r"at least [\d,.]+ GiB, and [\d,.]+ GiB are there -> lower resolution"):
        datasets.ensure_generated(huge, tmp_path, print)
    assert not list(tmp_path.rglob("*.hdf5"))


def test_data_larger_than_memory_stay_in_their_files(opened, monkeypatch):
    config, found = opened(**{"data.residency": "device"})
    monkeypatch.setattr(hardware, "host_memory_gib", lambda: 1e-9)
    with pytest.raises(DataError, match="GiB are there -> set it to workers"):
        Loader(found, config, 0, 1, "cpu")


def test_splits_are_disjoint_and_cover_the_samples(opened):
    _, datasets = opened()
    for dataset in datasets.values():
        parts = np.concatenate([dataset.splits[split] for split in ("train", "validation", "test")])
        assert sorted(parts) == list(range(20))
