"""The search for the fastest settings that train as well: what it tries, keeps and refuses, and why it ends."""

import json
from types import SimpleNamespace

import pytest
from made_runs import START, make_event

from upsnb import overlays
from upsnb.compare import ladder_figures, search
from upsnb.compare.search import Search, candidates, larger_batch
from upsnb.hardware import Hardware
from upsnb.phases import BY_NAME
from upsnb.runs import handle, runfolder

LAPTOP = Hardware("cpu", 1, "a laptop", 16.0, 2)
GAINS = {  # of each setting at its value; all others lose
    ("training.compile", True): 1.3,
    ("operator.pdet.attention", "math"): 1.2,
    ("training.inverse_loss_frequency", 4): 1.5,
    ("training.batch_size", 8): 1.4,
    ("training.batch_size", 16): 1.1,
    ("training.batch_size", 32): 1.1,
    ("optimizer.fused", True): 1.01,  # less than two equal arms differ
}


@pytest.fixture
def predictor(monkeypatch):
    """Predicts 256 MiB a pair."""

    def predict(config):
        footprint = SimpleNamespace(nbytes=2**28 * config.training.batch_size)
        return SimpleNamespace(at=lambda: footprint)

    monkeypatch.setattr(search, "Predictor", predict)


@pytest.fixture
def scripted(tiny_config, tmp_path, monkeypatch, predictor):
    """`scripted(error)`: a search whose measurements are GAINS, and whose trainings come to `error(changes, seed)`."""

    def make(error, **settings):
        base = tiny_config(("darcy",), **{"training.batch_size": 4, "training.accum_steps": 2, **settings})
        made = Search(base, tmp_path, 1e6, 1, lambda text: None)
        made.machine, made.trainings = LAPTOP, []

        def measure(turns, what):
            if what == "nothing":
                return {"median": 1.0, "ci95": [0.98, 1.02]}
            gain = 1.0
            for change in what.items():
                gain *= GAINS.get(change, 1.0 if change[0] == search.ACCUM else 0.95)
            return {"median": gain, "ci95": [gain - 0.01, gain + 0.01]}

        def train(name, changes, epochs, seed):
            made.trainings.append((name, epochs, seed))
            return error(changes, seed)

        monkeypatch.setattr(made, "measure", measure)
        monkeypatch.setattr(made, "error", train)
        return made

    return make


class Live:
    """Stands for the run that candidates are measured on."""

    def __init__(self):
        self.run, self.asked = self, []

    def update(self, overlay):
        self.asked.append(overlay)

    def wait_for(self, *arguments):
        pass


def noise(seed):
    return {42: 1.0, 43: 1.04, 44: 0.98}[seed]


def test_what_gains_is_kept_batch_after_batch_and_noise_is_not(scripted):
    made, live = scripted(lambda changes, seed: noise(seed)), Live()
    made.climb(live)
    kept = {path: value for _, changes, _ in made.adopted for path, value in changes.items()}
    assert kept == {
        "training.compile": True, "operator.pdet.attention": "math", "training.inverse_loss_frequency": 4,
        "training.query_sampling.num_queries": 1024, "training.batch_size": 32, "training.accum_steps": 1,
    }  # fmt: skip
    assert live.asked[-1] == overlays.difference(made.base, overlays.apply(made.base, kept))
    assert made.stopped == "no candidate gains any more"
    names = [row["change"] for row in made.tried]
    assert "fused" in names and not {name for name, *_ in made.adopted} & {"fused"}, "1 % is what equal arms differ by"
    assert names.index("batch 16 x 1") == names.index("batch 8 x 1") + 1, "the next batch at once"


def test_a_kernel_that_pays_in_16_bits_alone_is_found_together_with_them(scripted, monkeypatch):
    made = scripted(lambda changes, seed: 1.0)
    single = made.measure

    def measure(turns, what):
        if what != "nothing" and {"training.amp", search.KERNEL} <= what.keys():
            return {"median": 1.5, "ci95": [1.45, 1.55]}
        return single(turns, what)

    monkeypatch.setitem(GAINS, (search.KERNEL, "math"), 0.97)
    monkeypatch.setattr(made, "measure", measure)
    made.climb(Live())
    kept = {name: gain for name, _, gain in made.adopted}
    assert kept["bf16, attention math"] == 1.5 and not kept.keys() & {"bf16", "attention math"}


def test_equal_arms_that_were_disturbed_once_do_not_hide_gains(scripted, monkeypatch):
    made = scripted(lambda changes, seed: 1.0)
    single, intervals = made.measure, [(0.5, 1.5), (0.84, 1.01), (0.98, 1.02), (0.97, 1.01)]  # the first is for a step

    def measure(turns, what):
        return {"median": 1.0, "ci95": [*intervals.pop(0)]} if what == "nothing" else single(turns, what)

    monkeypatch.setattr(made, "measure", measure)
    made.climb(Live())
    assert made.floor == pytest.approx(0.03) and made.adopted and not intervals


def test_what_came_closest_is_tried_first_when_all_are_tried_again(scripted, monkeypatch):
    monkeypatch.setitem(GAINS, ("optimizer.fused", True), 1.015)
    made = scripted(lambda changes, seed: 1.0)
    made.climb(Live())
    names = [row["change"] for row in made.tried]
    second = next(number for number, name in enumerate(names) if name in names[:number])
    assert names[second] == "fused" and second > names.index("fused") + 1
    found = [row["ratio"]["median"] for row in made.tried[:second] if row["change"] in names[second:]]
    again = [names[:second].index(name) for name in names[second:] if name in names[:second]]
    assert [made.tried[number]["ratio"]["median"] for number in again] == sorted(found, reverse=True)


def test_a_step_without_some_of_the_datasets_may_train_worse(tiny_config):
    base = tiny_config(("darcy", "advection"), **{"training.batch_size": 4, "training.accum_steps": 4})
    batches = {(8, 2): False, (16, 1): True, (16, 2): True}
    assert {key: search.is_risky({search.BATCH: key[0], search.ACCUM: key[1]}, base) for key in batches} == batches
    alone = tiny_config(("darcy",), **{"training.batch_size": 4, "training.accum_steps": 4})
    assert not search.is_risky({search.BATCH: 16, search.ACCUM: 1}, alone)


@pytest.fixture
def gained(scripted):
    """`gained(error)`: a search that has kept loss_frequency, which may train worse, and compile."""

    def make(error):
        made = scripted(error)
        made.adopted = [
            ("compile", {"training.compile": True}, 1.3),
            ("loss", {"training.inverse_loss_frequency": 4}, 1.5),
        ]
        return made

    return make


def test_what_trains_worse_than_equal_arms_differ_is_left_out(gained):
    made = gained(lambda changes, seed: noise(seed) * (1.2 if "training.inverse_loss_frequency" in changes else 1.05))
    sets = made.sets()
    assert sets == {
        "all that gains": {"training.compile": True, "training.inverse_loss_frequency": 4},
        "without loss": {"training.compile": True},
    }
    assert made.halve(sets) == "without loss"
    assert not made.judged["all that gains"]["holds"] and made.judged["without loss"]["epochs"] == 4
    assert made.judged["without loss"]["tolerance"] == pytest.approx(1.04 / 0.98)


def test_the_faster_half_of_those_that_hold_is_trained_for_longer(gained):
    made = gained(lambda changes, seed: noise(seed))
    assert made.halve(made.sets()) == "all that gains"
    lengths = {name: {epochs for other, epochs, _ in made.trainings if other == name} for name, *_ in made.trainings}
    assert lengths == {"baseline": {1, 2, 4}, "all that gains": {1, 2, 4}, "without loss": {1}}
    assert [seed for name, epochs, seed in made.trainings if (name, epochs) == ("all that gains", 4)] == [42, 43, 44]


def test_a_set_that_fails_in_longer_trainings_gives_way_to_the_next(gained):
    def error(changes, seed):
        longer = any(epochs > 1 for _, epochs, _ in made.trainings)
        return 2.0 if longer and "training.inverse_loss_frequency" in changes else 1.0

    made = gained(error)
    assert made.halve(made.sets()) == "without loss"


def test_a_training_that_is_interrupted_does_not_go_on_without_the_search(tiny_config, tmp_path, monkeypatch):
    class Interrupted(handle.Run):
        def wait(self):
            raise KeyboardInterrupt

    def start(config, folder):
        runfolder.create(config, folder)
        return Interrupted(folder)

    monkeypatch.setattr(search.handle, "start", start)
    made = Search(tiny_config(), tmp_path, 1.0, 1, lambda text: None)
    with pytest.raises(KeyboardInterrupt):
        made.error("baseline", {}, 1, 42)
    assert runfolder.read_control(tmp_path / "runs/baseline-1-42").stop


def test_what_failed_in_the_last_trainings_in_time_is_not_chosen_for_having_held_before(gained):
    def error(changes, seed):
        if any(epochs > 1 for _, epochs, _ in made.trainings):
            made.seconds = -1.0
            return 2.0 if "training.inverse_loss_frequency" in changes else 1.0
        return 1.0

    made = gained(error)
    assert made.halve(made.sets()) == "without loss" and made.judged["without loss"]["epochs"] == 1
    assert made.stopped == "; the time for accuracy was spent"


def test_nothing_holds_and_nothing_is_recommended(gained):
    made = gained(lambda changes, seed: 2.0 if changes else noise(seed))
    assert made.halve(made.sets()) == "" and not any(row["holds"] for row in made.judged.values())


def test_when_time_is_spent_it_says_so_and_claims_nothing(gained):
    made = gained(lambda changes, seed: 1.0)
    made.seconds = -1.0
    assert made.halve(made.sets()) == "" and "time for accuracy was spent" in made.stopped
    made.climb(Live())
    assert made.stopped == "the time for throughput was spent" and not made.tried


def test_candidates_are_what_can_run_here_and_take_turns(tiny_config, predictor):
    base = tiny_config(
        **{"training.batch_size": 4, "training.accum_steps": 6, "operator.pdet.use_activation_checkpoint": True}
    )
    found = candidates(base, base, LAPTOP)
    plain = tiny_config(**{"training.batch_size": 4})
    assert list(candidates(plain, plain, LAPTOP))[-1] == "activation checkpointing", "what costs time comes last"
    assert {"compile", "bf16", "activation checkpointing off", "attention math", "batch 8 x 3"} <= found.keys()
    assert not {"FSDP2", "optimizer offload", "TF32", "async checkpoints", "attention sdpa"} & found.keys()
    assert found["batch 8 x 3"] == {"training.batch_size": 8, "training.accum_steps": 3}
    assert larger_batch(base, Hardware("cpu", 1, "a watch", 2.5, 2)) == {}, "predicted not to fit"


def test_settings_are_told_as_phases_where_they_are_some():
    changes = {"training.amp": True, "training.amp_dtype": "bfloat16", "training.batch_size": 16}
    assert search.told(changes) == "bf16 + batch size 16"


def test_without_a_batch_the_larger_ones_are_left_out_too(scripted):
    made = scripted(lambda changes, seed: 1.0)
    batches = [("8 x 1", 8, 1, 1.4), ("16 x 1", 16, 1, 1.2), ("32 x 1", 32, 1, 1.1)]  # the first has the pairs of 4 x 2
    made.adopted = [(f"batch {n}", {search.BATCH: size, search.ACCUM: accum}, g) for n, size, accum, g in batches]
    made.adopted.insert(2, ("compile", {"training.compile": True}, 1.05))
    found = {name: (changes[search.BATCH], "training.compile" in changes) for name, changes in made.sets().items()}
    assert found == {
        "all that gains": (32, True),
        "without batch 32 x 1": (16, True),
        "without batch 16 x 1": (8, True),
    }
    assert list(found) == sorted(found, key=lambda name: -found[name][0]), "the fastest first"


@pytest.mark.slow
def test_a_short_search_ends_with_what_it_tried_and_why_it_ended(tiny_config, tmp_path, monkeypatch):
    small = {
        "SEEDS": (42, 43),
        "ROUNDS": 1,
        "MOST_STEPS": 75,
        "BY_NAME": {},
        "KERNELS": {"cpu": ("math",)},
        "QUERIES": (),
    }
    for name, value in small.items():
        monkeypatch.setattr(search, name, value)
    base = tiny_config(("darcy",), **{"training.batch_size": 8, "training.accum_steps": 2})
    found = search.recommend(base, tmp_path, minutes=10, log=lambda text: None)
    names = [row["change"] for row in found["tried"]]
    assert {"batch 16 x 1", "attention math"} <= {*names} and found["tried"][0]["ratio"]["median"]
    refused = [row["ratio"]["why"] for row in found["tried"] if row["change"] == "batch 32 x 1"]
    assert all("dataset darcy has 16 training pairs" in why for why in refused), "16 x 1 may not have gained"
    assert "no candidate gains any more" in found["basis"] and found["noise_floor"] > 0
    assert list(ladder_figures.tried({"recommended": found})["tried"])[: len(names)] == names
    assert bool(found["changes"]) == bool(found["ratio"]) and (found["accuracy"] or not found["changes"])


@pytest.mark.parametrize(
    ("what", "interval", "num_rounds", "ends"),
    [
        ({}, (1.2, 1.4), 3, True),
        ({}, (0.97, 1.01), 3, True),
        ({}, (1.2, 1.4), 2, False),
        ({}, (1.05, 1.4), 3, False),
        ({}, (0.97, 1.03), 3, False),
        ({}, (1, 1), 0, False),
        ("nothing", (0.97, 0.99), 3, False),
    ],
)
def test_a_measurement_ends_as_soon_as_it_is_settled(tiny_config, tmp_path, what, interval, num_rounds, ends):
    """A tenth above 1 or more, or no higher than two equal arms of 2 %; the request that ends it changes nothing."""
    asked = []

    class Run:
        folder = tmp_path

        def measure(self, what, within, steps):
            effect = {"median": sum(interval) / 2, "ci95": interval} if num_rounds else {}
            begins = {"kind": "measuring", "step": 0, "time": 0.0, "applied": True, "revision": 7}
            turn = {"kind": "turn", "step": 9, "time": 1.0, "revision": 7, "arm": 1, "num_rounds": num_rounds, **effect}
            done = make_event("flip_effect", step=20, time=9.0, revision=7)
            with open(tmp_path / "events.jsonl", "a") as file:
                file.writelines(json.dumps(event) + "\n" for event in (begins, turn, turn, done))
            return 7

        def update(self, overlay):
            asked.append(overlay)
            return 8

    made = search.Search(tiny_config(), tmp_path, 20.0, 1, lambda text: None)
    made.floor = 0.02
    made.measure(SimpleNamespace(run=Run(), is_alive=lambda: True), what)
    assert asked == [{}] * ends


def test_longer_trainings_begin_only_where_the_time_for_them_is_left(gained, monkeypatch):
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(search, "time", SimpleNamespace(monotonic=lambda: clock.now))

    def error(changes, seed):
        clock.now += 10.0
        return noise(seed)

    made = gained(error)
    made.began, made.seconds = 0.0, 100.0
    assert made.halve(made.sets()) == "all that gains"
    assert {epochs for _, epochs, _ in made.trainings} == {1} and "longer trainings would have taken" in made.stopped


def test_slow_steps_shorten_a_measurement_and_quick_ones_do_not(tiny_config, tmp_path):
    """12 of 20 minutes are for throughput: each of 16 measurements gets 45 s, but no fewer steps than it needs."""
    asked, seconds = [], (0.01, 0.25, 3.0, 0.0)

    class Run:
        folder = tmp_path

        def measure(self, what, within, steps):
            asked.append(steps)
            begins = {"kind": "measuring", "step": 0, "time": 0.0, "applied": True, "revision": len(asked)}
            time_s = steps * seconds[len(asked) - 1]
            ends = make_event("flip_effect", step=steps, time=time_s, revision=len(asked))
            with open(tmp_path / "events.jsonl", "a") as file:
                file.writelines(json.dumps(event) + "\n" for event in (begins, ends))
            return len(asked)

    made = search.Search(tiny_config(), tmp_path, 20.0, 1, lambda text: None)
    turns = SimpleNamespace(run=Run(), is_alive=lambda: True)
    for _ in seconds:
        made.measure(turns, {})
    assert asked == [search.LEAST_STEPS, search.MOST_STEPS, 180, search.LEAST_STEPS]


def test_what_trains_worse_is_refused_by_the_name_that_its_run_gives_the_error(
    of_tokens, tiny_config, tmp_path, monkeypatch
):
    run = SimpleNamespace(wait_for=lambda *_: None, resume=lambda: 1, pause=lambda: 2)
    live = SimpleNamespace(run=run, events=[{"kind": "start", **START}], end=lambda: None)
    monkeypatch.setattr(search.Turns, "start", lambda *_: live)
    monkeypatch.setattr(search.preflight, "foreseen", lambda *_: {})
    monkeypatch.setattr(Search, "climb", lambda made, _: made.adopted.append(("bf16", BY_NAME["bf16"].on, 1.3)))
    monkeypatch.setattr(Search, "error", lambda made, name, changes, epochs, seed: 2.0 if changes else 1.0)
    said = []
    found = search.recommend(tiny_config(("darcy",)), tmp_path, 1e6, log=said.append)
    assert list(found["refused"].values()) == ["validation perplexity is 2.000 times the baseline's, equal arms: 1.000"]
    assert said == ["all that gains: perplexity 2.000 times the baseline's, equal arms up to 1.000"]
