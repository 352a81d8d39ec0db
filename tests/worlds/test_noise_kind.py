import numpy as np
import pytest
from support.worlds import SeedWorld, ToyWorld
from support.wrong_worlds import WRONG_WORLDS, drift_world

from cqm.worlds.check import check_world
from cqm.worlds.function import FunctionWorld
from cqm.worlds.nuisance import Nuisance, NuisanceWorld

WRONG = {world.__name__: world for world in WRONG_WORLDS}


def problem(world, seed=0):
    """What the check says about the noise."""
    (check,) = (c for c in check_world(world, seed=seed).checks if c.name == "noise kind")
    assert check.passed == (check.detail == "")
    return check.detail


def shop(step, exogenous, **changes):
    """A stock that is moved by a step function and an exogenous input."""
    settings = {
        "initial": lambda num, rng: rng.uniform(0, 9, (num, 1)),
        "candidate_actions": [[0.0], [4.0], [8.0]],
        "feature_names": ["stock"],
    }
    return FunctionWorld(step, exogenous=exogenous, **{**settings, **changes})


CODES = np.random.default_rng(0).permutation(60)


def sell(stock, order, demand):
    return np.maximum(stock + order - demand, 0)


SIGNALS = {
    "whole numbers": shop(sell, lambda num, horizon, rng: rng.poisson(4, (num, horizon, 1))),
    "many whole numbers, rounded down": shop(
        lambda stock, order, demand: sell(stock, order, np.floor(demand / 100)),
        lambda num, horizon, rng: rng.poisson(1000, (num, horizon, 1)),
    ),
    "a threshold": shop(
        lambda stock, order, chance: 0.9 * stock + order * (chance < 0.3) - (chance > 0.9),
        lambda num, horizon, rng: rng.random((num, horizon, 1)),
    ),
    "whole numbers about 50": shop(
        lambda stock, order, demand: np.where(stock < 99, 200 + order, stock) - demand,
        lambda num, horizon, rng: rng.poisson(50, (num, horizon, 1)),
    ),
    "quarter hours": shop(  # a nudge down, but not up, changes which half hour it is
        lambda stock, order, time: 0.5 * stock + np.floor(4 * time) % 2,
        lambda num, horizon, rng: rng.integers(96, size=(num, horizon, 1)) / 4,
    ),
    "yes or no": shop(
        lambda stock, order, event: np.where(event.astype(bool), stock + 1, 0.9 * stock),
        lambda num, horizon, rng: rng.random((num, horizon, 1)) < 0.3,
    ),
    "often exactly zero": shop(
        lambda stock, order, demand: np.where(demand != 0, stock + 5, 0.9 * stock),
        lambda num, horizon, rng: (
            rng.exponential(size=(num, horizon, 1)) * (rng.random((num, horizon, 1)) < 0.4)
        ),
    ),
    "codes of categories": shop(
        lambda stock, order, code: 0.5 * stock + CODES[code.astype(int)],
        lambda num, horizon, rng: rng.integers(60, size=(num, horizon, 1)),
    ),
    "heavy tails": shop(sell, lambda num, horizon, rng: rng.lognormal(0, 3, (num, horizon, 1))),
    "a chaotic step": shop(
        lambda stock, order, shock: np.mod(7 * stock + shock, 1),
        lambda num, horizon, rng: rng.normal(size=(num, horizon, 1)),
        initial=lambda num, rng: rng.random((num, 1)),
    ),
    "failures when it is negative": shop(
        lambda stock, order, demand: 0.9 * stock + np.sqrt(demand),
        lambda num, horizon, rng: rng.exponential(size=(num, horizon, 1)),
    ),
    "differences that are rounding errors": shop(
        lambda stock, order, shock: stock + np.concatenate([shock, -shock], axis=1),
        lambda num, horizon, rng: rng.normal(size=(num, horizon, 1)),
        initial=lambda num, rng: np.repeat(rng.random((num, 1)), 2, axis=1),
        features=lambda x, u, e, y: np.stack([y[:, 0], y.sum(axis=1) - x.sum(axis=1)], axis=1),
        feature_names=["stock", "lost"],
    ),
    "a late effect": shop(
        lambda stock, order, demand: np.concatenate([demand, stock[:, :-1]], axis=1),
        lambda num, horizon, rng: rng.normal(size=(num, horizon, 1)),
        initial=lambda num, rng: rng.normal(size=(num, 5)),
        features=lambda x, u, e, y: y[:, 4:],
    ),
    "no effect": shop(
        lambda stock, order, demand: 0.9 * stock + order,
        lambda num, horizon, rng: rng.normal(size=(num, horizon, 1)),
    ),
    "a trace": drift_world(exogenous=None, trace=np.eye(70, 2), features=None),
}


@pytest.mark.parametrize("name", SIGNALS)
def test_signals_pass(name):
    assert SIGNALS[name].noise_kind == "signal"
    for seed in range(3):
        assert problem(SIGNALS[name], seed) == ""


def test_seeds_may_always_be_declared():
    assert problem(type("Declared", (ToyWorld,), {"noise_kind": "seeds"})()) == ""
    for limit in (np.inf, 1.0, -1.0):
        assert problem(SeedWorld(limit)) == ""


@pytest.mark.parametrize("most", [400, 10**4, 2**53])
def test_seeds_of_any_size_are_no_signal(most):
    def seeds(self, num, horizon, rng):
        return rng.integers(most, size=(num, horizon, 1))

    world = type("Seeds", (WRONG["SeedsAsSignal"],), {"sample_noise": seeds})(limit=-1.0)
    for seed in range(3):
        assert problem(world, seed) == (
            "nudging the noise by a thousandth of its spread changes 'x' about as much as fresh "
            "noise does, so its numbers act as seeds; declare noise_kind 'seeds', or sample the "
            "random quantities themselves (demand, wind) and use them in the step"
        )


@pytest.mark.parametrize("mix", [False, True], ids=["alone", "with a nuisance"])
def test_undeclared_noise_is_reported_if_it_matters(mix):
    def idle(self, num, horizon, rng):
        return np.zeros((num, horizon, 1))

    world = WRONG["UndeclaredNoise"]()
    quiet = type("Quiet", (WRONG["UndeclaredNoise"],), {"sample_noise": idle, "fixed_noise": True})
    if mix:
        world = NuisanceWorld(world, Nuisance(dimension=2))
    assert problem(world) == (
        "different noise changes the features, but noise_kind is 'none'; declare 'signal' if its "
        "numbers enter the step, such as demand or wind, and 'seeds' if they seed a generator"
    )
    assert problem(quiet()) == ""
    assert problem(NuisanceWorld(quiet(), Nuisance(dimension=2))) == ""


def test_noise_that_only_makes_branches_fail_matters():
    world = drift_world(features=lambda x, u, e, y: np.where(e[:, :1] > 0.5, np.nan, u))
    world.noise_kind = "none"
    assert "different noise changes the features" in problem(world)


def test_draws_that_are_denied_are_counted():
    assert "16 of 16 rollouts that report no draws depend on the noise" in problem(
        WRONG["DeniedDraws"](limit=-1.0)
    )
