"""Mistakes in arguments are explained at the door, in our own words, and sizes before work."""

import os
import time

import numpy as np
import pytest
from support.logs import arrays
from support.worlds import ToyWorld, pendulum_world

import cqm
from cqm import arguments, bounds, capacity, decisions, measures, quotient
from cqm.models.training import checkpointed_updates
from cqm.worlds.contract import MAX_BATCH

TOY = ToyWorld()
RNG = np.random.default_rng(0)
EFFECTS = quotient.center(RNG.normal(size=(5, 3, 2)))


@pytest.fixture(scope="module")
def branches():
    return cqm.collect(pendulum_world(), states=40, horizon=2, seed=3)


def direct(**settings):
    return cqm.EffectModel(candidates="direct", **settings)


class Unprintable:
    def __repr__(self):
        raise RuntimeError("no")


@pytest.mark.parametrize("value", [True, 2.0, 1.5, float("nan"), "3", None, [3], np.bool_(True)])
def test_what_is_no_whole_number(value):
    with pytest.raises(ValueError, match=r"^states must be a whole number of at least 1; got "):
        arguments.whole_number("states", value, least=1)


def test_numpy_integers_are_whole_numbers():
    assert arguments.whole_number("states", np.int16(3), least=1, most=3) == 3


@pytest.mark.parametrize("value", [True, "1", None, float("nan"), np.inf, 1j, 10**400, [0.5], 1.0])
def test_what_is_no_share(value):
    with pytest.raises(ValueError, match=r"^validation must be a number in \[0, 1\); got "):
        arguments.number("validation", value, least=0, below=1)


def test_a_value_is_shown_on_one_short_line():
    assert arguments.shown(np.zeros((2, 3))) == "a float64 array of shape [2, 3]"
    assert len(arguments.shown({i: "x" * 90 for i in range(9)})) <= 80
    assert "Unprintable" in arguments.shown(Unprintable())


@pytest.mark.parametrize(
    "value",
    [
        "x",
        None,
        {},
        [[1], [1, 2]],
        [1, None],
        np.array([1j]),
        np.array(["1"]),
        np.array([object()]),
        np.ma.masked_array([1.0, 2.0], [True, False]),
        np.array(["2020-01-01"], "datetime64[D]"),
        object(),
    ],
)
def test_what_are_no_real_numbers(value):
    with pytest.raises(ValueError, match=r"^weights must be numbers \[features\]; got "):
        arguments.real_numbers("weights", value, ("features",))


def test_numbers_are_not_copied_if_they_are_right_already():
    values = np.zeros(3)
    assert arguments.real_numbers("weights", values) is values


@pytest.mark.parametrize("value", [3, None, "", b"x", "a\0b", "a" * 300])
def test_what_is_no_path(value):
    with pytest.raises(ValueError, match="directory must be a path"):
        cqm.Branches.open(value)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda b: cqm.collect(3), "world must be a World or the name of one"),
        (lambda b: cqm.collect("cartpole-swingupp"), "did you mean 'cartpole-swingup'"),
        (lambda b: cqm.collect(TOY, states=True), "states must be a whole number.*got True"),
        (lambda b: cqm.collect(TOY, per_step="yes"), "per_step must be True or False; got 'yes'"),
        (lambda b: cqm.collect(TOY, arms=b), "arms must be a whole number"),
        (lambda b: cqm.collect(TOY, continuation={}), "continuation must be 'uniform', 'box', one"),
        (lambda b: cqm.collect(TOY, show_progress=3), "show_progress must be True, False or None"),
        (lambda b: cqm.Policy(3, len), "name of a policy must be text"),
        (lambda b: cqm.Policy("p", 3), "act must be a function; got 3"),
        (lambda b: cqm.combine(b), "sets must be a list of branches; got Branches"),
        (lambda b: cqm.combine([b, 3]), "a set must be Branches or their directory; got 3"),
        (lambda b: b["x":3], "start of a slice must be a whole number; got 'x'"),
        (lambda b: b.split("x"), "test must be a whole number; got 'x'"),
        (lambda b: b.array(3), "unknown array 3"),
        (lambda b: cqm.load_world(3), "name must be the name of a world"),
        (lambda b: cqm.load_world("reacher-easy", features=3), r"features must be Squares\(\)"),
        (lambda b: cqm.load_world("reacher-easy", nuisance=1.5), "nuisance must be a whole number"),
        (lambda b: cqm.Nuisance(scale=np.nan), "scale must be a number of at least 0; got nan"),
        (lambda b: pendulum_world(initial=3), "initial must be a function; got 3"),
        (lambda b: pendulum_world(initial=lambda n, r: "x"), "must be an array of numbers"),
        (lambda b: pendulum_world(initial=lambda n, r: {}[n]), "initial raised KeyError"),
        (lambda b: pendulum_world(observe=lambda s: None), "result of observe must be numbers"),
        (lambda b: pendulum_world(feature_names=3), "feature_names must be several names"),
        (lambda b: pendulum_world().reset(MAX_BATCH + 1, RNG), "num must be a whole number in"),
        (lambda b: pendulum_world().reset(3, 0), "rng must be a generator from np.random"),
        (lambda b: pendulum_world().observe({}), "states must be a dictionary of arrays"),
        (lambda b: cqm.EffectModel().fit(3), "EffectModel learns from Branches; got 3"),
        (lambda b: cqm.EffectModel(width=2.5).fit(b), "width must be a whole number.*got 2.5"),
        (lambda b: cqm.EffectModel(updates=np.nan).fit(b), "updates must be a whole number"),
        (lambda b: direct(updates={"direct": 3}).fit(b), "updates must be a list of numbers"),
        (lambda b: direct(updates={"direct": [0]}).fit(b), "updates in a cycle must be a whole"),
        (lambda b: direct(updates={"magic": [3]}).fit(b), "a name in updates must be"),
        (lambda b: cqm.EffectModel(candidates=3).fit(b), "candidates must be several names"),
        (lambda b: cqm.EffectModel(seed=-1).fit(b), r"seed must be .* in \[0, 4294967295\]"),
        (lambda b: cqm.EffectModel(training=3).fit(b), "training must be a cqm.Training or None"),
        (lambda b: cqm.EffectModel(graph=3).fit(b), "graph must be a ComparisonGraph or None"),
        (lambda b: cqm.ResidualModel(weighting=1).fit(logs()), "weighting must be True or False"),
        (lambda b: cqm.EffectModel().calibrate(b), "the model is not fitted"),
        (lambda b: cqm.EffectModel().certify([0], "x"), "the model is not fitted"),
        (lambda b: cqm.Training(learning_rate=-1.0), "learning_rate must be a number above 0"),
        (lambda b: cqm.Training(updates=np.nan), "updates must be a whole number.*got nan"),
        (lambda b: cqm.Training(clip=None), "clip must be a number above 0; got None"),
        (lambda b: cqm.Query([np.nan]), "weights must be finite; got NaN or infinity in 1 of 1"),
        (lambda b: cqm.Query.named({"angle": "x"}, b), r"weights\['angle'\] must be a finite num"),
        (lambda b: cqm.Query.named(["angle"], b), "weights must be a dictionary of numbers by"),
        (lambda b: cqm.Query.formula("angle", cqm.EffectModel()), "must come from a fitted model"),
        (lambda b: decisions.act("x", np.ones(2)), "effects must be numbers"),
        (lambda b: decisions.act(EFFECTS, np.full(2, np.nan)), "query must be finite"),
        (lambda b: decisions.act(EFFECTS, np.ones((1, 1, 2))), r"\[features\] for one query"),
        (lambda b: decisions.rank({}), r"advantages must be numbers \[..., actions\]"),
        (lambda b: decisions.calibrate(EFFECTS, EFFECTS), r"draws must be numbers \[n, draws"),
        (lambda b: bounds.total_mass("x", 3), r"discount must be a number in \[0, 1\]; got 'x'"),
        (lambda b: quotient.center("x"), "outcomes must be numbers; got 'x'"),
        (lambda b: quotient.effect_rank(np.full((3, 2), np.inf)), "effects must be finite"),
        (lambda b: measures.mass(None), r"measures must be numbers \[..., events\]; got None"),
        (lambda b: measures.successor_measure(3, discount=0.5), "mdp must be a FiniteMDP; got 3"),
        (lambda b: cqm.Logs.from_arrays("x", [0], [[[0.0]]]), "observations must be numbers"),
        (lambda b: cqm.Logs.from_branches(3, rng=RNG), "branches must be Branches or their dir"),
        (lambda b: logs()["x"], "logs can only be indexed by slices or arrays of row numbers"),
        (lambda b: cqm.Scorer({}), "arrays must be those of a saved EffectModel"),
        (lambda b: cqm.GymWorld(3), "env must be a registered id"),
    ],
)
def test_mistakes_are_explained(call, message, branches):
    with pytest.raises(ValueError, match=message):
        call(branches)


def logs():
    return cqm.Logs.from_arrays(**arrays())


@pytest.mark.parametrize(
    "read", [cqm.Branches.open, cqm.Logs.load, cqm.load_model, cqm.Scorer.load, cqm.MujocoWorld]
)
def test_what_is_not_there_is_named(read, tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for place in (tmp_path / "nowhere", tmp_path / "pipe"):
        with pytest.raises(FileNotFoundError, match=place.name):
            read(place)


@pytest.mark.parametrize(
    ("call", "need"),
    [
        (lambda b: cqm.collect(TOY, states=10**15), "TB of memory; this machine has"),
        (lambda b: cqm.collect(TOY, states=4, horizon=10**12), "TB of memory; this machine has"),
        (lambda b: cqm.collect(TOY, states=256, draws=10**9), "TB of memory; this machine has"),
        (lambda b: cqm.collect(TOY, states=4, warmup=(0, 10**15)), "TB of memory; this machine"),
        (lambda b: cqm.load_world("reacher-easy", nuisance=40_000), "needs .* GB of memory"),
        (lambda b: direct(members=10**8).fit(b), "TB of memory; this machine has"),
        (lambda b: direct(width=10**8).fit(b), "TB of memory; this machine has"),
        (lambda b: quotient.ComparisonGraph.complete(10**15), r"\[2, 32768\]"),
    ],
)
def test_absurd_sizes_are_refused_at_once(call, need, branches):
    began = time.process_time()
    with pytest.raises(ValueError, match=need):
        call(branches)
    assert time.process_time() - began < 5  # without importing and tracing, far below a second


def test_absurd_sizes_on_disk_are_refused_and_leave_no_trace(tmp_path):
    with pytest.raises(ValueError, match=r"1,000,000,000,000,000 states needs about .* on disk"):
        cqm.collect(TOY, states=10**15, out=tmp_path / "set")
    assert not (tmp_path / "set").exists()


def test_a_set_that_is_there_already_counts_towards_its_disk_space(tmp_path, monkeypatch):
    (tmp_path / "shard").write_bytes(bytes(1000))
    usage = type("Usage", (), {"free": 2e9})
    monkeypatch.setattr("shutil.disk_usage", lambda place: usage)
    capacity.require_disk("a set", 2e9 + 1000, tmp_path, "collect less")
    with pytest.raises(ValueError, match=r"a set needs about 2 GB on disk; .* has 2 GB free"):
        capacity.require_disk("a set", 2e9 + 1001, tmp_path, "collect less")


def test_many_actions_are_refused():
    with pytest.raises(ValueError, match="at most 32,768 actions can be compared; got 32,769"):
        pendulum_world(candidate_actions=np.linspace(-1, 1, 32_769)[:, None], block_size=1)


@pytest.mark.filterwarnings("ignore:no effect stood out")
def test_what_is_meant_is_understood(tmp_path):
    world, shared = pendulum_world(), {"states": 20, "horizon": 2}
    first, second = (
        cqm.collect(world, **shared, seed=seed, out=tmp_path / str(seed)) for seed in (1, 2)
    )
    assert len(cqm.collect("cartpole-swingup", states=2, horizon=1)) == 2
    assert len(cqm.combine([tmp_path / "1", str(tmp_path / "2")])) == len(first) + len(second)
    logs().save(tmp_path / "logs")
    with pytest.raises(ValueError, match=r"EffectModel learns from Branches; got Logs.*ResidualM"):
        cqm.EffectModel().fit(tmp_path / "logs")
    assert cqm.ResidualModel().fit(str(tmp_path / "logs")).num_examples_ == len(logs())


def test_plain_weights_can_be_certified():
    rng = np.random.default_rng(1)
    draws = rng.normal(size=(60, 16, 3, 2))
    calibration = decisions.calibrate(draws.mean(axis=1), draws)
    general = {"discount": 0.9, "horizon": 3, "confidence": 0.9}
    plain = decisions.certify(EFFECTS, np.array([1.0, 2.0]), calibration, **general)
    query = decisions.certify(EFFECTS, cqm.Query([1.0, 2.0]), calibration, **general)
    np.testing.assert_array_equal(plain.action, query.action)
    np.testing.assert_array_equal(plain.radius, query.radius)
    with pytest.raises(ValueError, match="expected one query; got 2 of them; ask one by one"):
        decisions.certify(EFFECTS, np.ones((2, 2)), calibration, **general)


def test_without_any_effect_there_is_no_noise_floor():
    zeros = np.zeros((4, 2, 3, 2))
    assert decisions.Calibration.from_draws(zeros[:, 0], zeros).noise_floor == 0.0


def test_no_checkpoint_means_no_updates(tmp_path):
    assert checkpointed_updates(tmp_path) == {}
