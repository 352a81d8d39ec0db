"""The residual model: convergence, double robustness, weighting, and what it refuses."""

import numpy as np
import pytest
from support.finite import Problem, rotating, slope
from support.worlds import excess, pendulum_world

import cqm
from cqm.branches.recipe import Policy
from cqm.logs.dataset import Logs
from cqm.models.estimator import load_model
from cqm.models.residual import ResidualModel
from cqm.models.scorer import Scorer
from cqm.models.training import Training
from cqm.queries import Query
from cqm.quotient import center
from cqm.worlds.nuisance import Nuisance, NuisanceWorld

SETTINGS = {"horizon": 6, "warmup": (0, 0)}
QUICK = Training(updates=400, batch_size=32, learning_rate=4e-3, schedule="cosine", chunk=200)
STEPS = {"method": "steps", "width": 32, "training": QUICK, "draws": 16}


# A nuisance that no action moves is what most of these tests are about.
pytestmark = pytest.mark.filterwarnings("ignore:effects are set to zero")


@pytest.fixture(scope="module")
def problems():
    return [Problem.random(np.random.default_rng(seed)) for seed in range(6)]


@pytest.fixture(scope="module")
def world():
    return NuisanceWorld(pendulum_world(), Nuisance(dimension=8, seed=1))


@pytest.fixture(scope="module")
def logs(world):
    branches = cqm.collect(world, states=4000, per_step=True, seed=1, **SETTINGS)
    return Logs.from_branches(branches, rng=np.random.default_rng(0))


@pytest.fixture(scope="module")
def held_out(world):
    return cqm.collect(world, states=200, draws=32, seed=2, **SETTINGS)


@pytest.fixture(scope="module")
def direct(logs):
    return ResidualModel(method="direct").fit(logs)


@pytest.fixture(scope="module")
def steps(logs):
    return ResidualModel(**STEPS).fit(logs)


def error(model, problem):
    return np.sqrt(
        np.mean((model.effect(problem.observations) - problem.effects) ** 2)
        / np.mean(problem.effects**2)
    )


def test_tabular_error_falls_with_the_root_of_the_trajectories(problems):
    sizes = [1000, 4000, 16000]
    make = lambda: ResidualModel(method="tabular")
    assert -0.6 < slope(make, problems, sizes, seed=1) < -0.4


@pytest.mark.filterwarnings("ignore:poor coverage")  # it is right
def test_doubly_robust_needs_one_of_the_two_and_plain_ones_do_not_do(problems):
    problem = problems[0]
    logs = problem.logs(30_000, np.random.default_rng(3))
    lying = np.array([0.8, 0.1, 0.1])  # the same wrong propensities in every state
    robust = {"method": "tabular", "doubly_robust": True}
    wrong_propensities = ResidualModel(**robust).fit(logs.with_propensities(lying))
    wrong_outcome = ResidualModel(**robust, outcome="additive").fit(logs)
    assert error(wrong_propensities, problem) < 0.1
    assert error(wrong_outcome, problem) < 0.1
    plain = ResidualModel(method="tabular").fit(logs.with_propensities(lying))
    additive = ResidualModel(method="tabular", outcome="additive").fit(logs)
    both_wrong = ResidualModel(**robust, outcome="additive").fit(logs.with_propensities(lying))
    assert error(plain, problem) > 0.3
    assert error(additive, problem) > 0.3
    assert error(both_wrong, problem) > 0.3
    assert error(ResidualModel(method="tabular").fit(logs), problem) < 0.1


def test_unknown_propensities_are_estimated_and_said_to_be(problems):
    logs = problems[0].logs(20_000, np.random.default_rng(4), propensities="unknown")
    model = ResidualModel(method="tabular").fit(logs)
    assert error(model, problems[0]) < 0.15
    assert "propensities were unknown and estimated" in model.summary()


SLOW_STEPS = pytest.param("steps", marks=pytest.mark.slow)  # compiling takes most of the time


@pytest.mark.parametrize("kind", ["direct", SLOW_STEPS])
def test_both_methods_find_the_expected_effects(kind, request, held_out):
    assert excess(request.getfixturevalue(kind), held_out) < 0.1


def test_a_card_says_where_effects_were_seen(direct):
    assert (
        "visible in 2 of 11 directions" in direct.summary()
        or "visible in 3 of 11" in direct.summary()
    )


def test_weighting_finds_what_the_nuisance_buries(logs, direct, held_out):
    plain = ResidualModel(method="direct", weighting=False).fit(logs)
    assert excess(direct, held_out) < 0.2 * excess(plain, held_out)


def test_the_doubly_robust_regression_of_waves(logs, held_out):
    model = ResidualModel(doubly_robust=True).fit(logs)
    assert excess(model, held_out) < 0.3


@pytest.mark.parametrize("method", ["direct", SLOW_STEPS])
def test_a_behaviour_that_sees_the_state(method):
    """Later actions answer to the first one's effect, which must not be explained away."""
    world = pendulum_world()

    def propensities(observations):
        push = 1 / (1 + np.exp(2 * observations[:, 0]))  # back towards angle zero
        return np.stack([0.1 + 0.6 * (1 - push), np.full(len(push), 0.2), 0.1 + 0.6 * push], axis=1)

    def act(observations, uniforms):
        return (uniforms[:, None] >= np.cumsum(propensities(observations), axis=1)[:, :-1]).sum(
            axis=1
        )

    policy = Policy("balance", act)
    recipe = {**SETTINGS, "continuation": policy}
    branches = cqm.collect(world, states=4000, per_step=True, seed=1, **recipe)
    held_out = cqm.collect(world, states=200, draws=32, seed=2, **recipe)
    logs = Logs.from_branches(branches, propensities=propensities, rng=np.random.default_rng(0))
    model = ResidualModel(**(STEPS if method == "steps" else {})).fit(logs)
    assert excess(model, held_out) < 0.15


@pytest.mark.parametrize("name", ["direct", SLOW_STEPS])
def test_one_surface(name, request, world, held_out, tmp_path):
    observations, query = held_out.observations[:30], Query.named({"angle": 1.0}, world)
    model = request.getfixturevalue(name)
    effects = model.effect(observations)
    assert effects.shape == (30, 3, 11)
    assert np.abs(effects.sum(axis=1)).max() <= 1e-9 * np.abs(effects).max()
    reference = [0.2, 0.3, 0.5]
    moved = model.recenter(reference).effect(observations)
    np.testing.assert_allclose(moved, center(effects, reference), atol=1e-9)
    contrast = model.effect(observations, action=2, baseline=0)
    np.testing.assert_allclose(contrast, effects[:, 2] - effects[:, 0], atol=1e-12)
    assert np.mean(model.act(observations, query) == 2) > 0.9  # pushing forward turns forward
    assert model.rank(observations, query).shape == (30, 3)
    model.calibrate(held_out)
    verdict = model.certify(observations, query)
    assert np.isfinite(verdict.radius).all()
    model.save(tmp_path / name)
    loaded = ResidualModel.load(tmp_path / name)
    np.testing.assert_array_equal(loaded.effect(observations), effects)
    assert loaded.calibration_.excess_error == model.calibration_.excess_error
    assert isinstance(load_model(tmp_path / name), ResidualModel)
    assert "4,000 logged trajectories" in (tmp_path / name / "README.md").read_text()


def test_an_ensemble_is_the_mean_of_its_members(logs, held_out):
    model = ResidualModel(method="direct", members=3).fit(logs[:1000])
    members = model.member_effects(held_out.observations[:10])
    assert members.shape[0] == 3
    assert np.abs(members[0] - members[1]).max() > 1e-6
    np.testing.assert_allclose(members.mean(axis=0), model.effect(held_out.observations[:10]))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"method": "magic"}, "method must be 'direct', 'steps' or 'tabular'"),
        ({"outcome": "none"}, "outcome must be 'full' or 'additive'"),
        ({"folds": 1}, "folds must be a whole number of at least 2"),
        ({"method": "steps", "doubly_robust": True}, "neither doubly_robust=True"),
        ({"width": 8}, "the method 'direct' trains none"),
        ({"training": QUICK}, "the method 'direct' trains none"),
    ],
)
def test_bad_parameters_are_refused_by_fit(settings, message, logs):
    with pytest.raises(ValueError, match=message):
        ResidualModel(**settings).fit(logs)


def test_a_failed_fit_leaves_nothing_half_fitted(logs, held_out):
    model = ResidualModel(method="direct").fit(logs[:500])
    never = logs[:500][logs.first_actions[:500] != 1]
    with pytest.raises(ValueError, match=r"actions \[1\] never occur"):
        model.fit(never)
    with pytest.raises(ValueError, match="the model is not fitted"):
        model.effect(held_out.observations)
    with pytest.raises(ValueError, match="learns from Logs; got Branches"):
        model.fit(held_out)


def test_a_single_state_is_warned_about_and_only_a_table_averages_it():
    rng = np.random.default_rng(0)
    actions = rng.integers(2, size=500)
    logs = Logs.from_arrays(np.ones((500, 2)), actions, actions[:, None, None] + 0.0)
    with (
        pytest.warns(UserWarning, match="all observations are the same"),
        pytest.raises(ValueError, match="nothing to regress on"),
    ):
        ResidualModel().fit(logs)
    with pytest.warns(UserWarning, match="all observations are the same"):
        model = ResidualModel(method="tabular").fit(logs)
    assert model.effect(np.ones((1, 2)), action=1, baseline=0)[0, 0] == pytest.approx(1, abs=0.02)
    with pytest.raises(ValueError, match="is not among the 1 observations"):
        model.effect(np.zeros((1, 2)))


def test_steps_need_features_that_are_the_next_observation():
    rng = np.random.default_rng(0)
    logs = Logs.from_arrays(
        rng.normal(size=(900, 2)), rng.integers(2, size=(900, 3)), rng.normal(size=(900, 3, 1))
    )
    with pytest.raises(ValueError, match="needs features that are the next observation"):
        ResidualModel(method="steps").fit(logs)
    assert ResidualModel(folds=3).fit(logs).effect(np.zeros((1, 2))).shape == (1, 2, 1)


@pytest.mark.parametrize("settings", [{}, {"doubly_robust": True}, {"method": "tabular"}])
def test_logs_with_a_rhythm_are_as_good_as_others(settings):
    model = ResidualModel(**settings).fit(rotating(2000, 5))
    found = model.effect([[0.0], [1.0]], action=1, baseline=0)
    np.testing.assert_allclose(found, [[1.0], [2.0]], atol=0.1)


def test_tables_of_states_in_turn_and_of_negative_zeros():
    states = np.array([-0.0, 1.0, 2.0, 3.0, 4.0])[np.arange(1000) % 5][:, None]
    actions = np.random.default_rng(0).integers(2, size=1000)
    outcomes = 100 * states + actions[:, None]
    logs = Logs.from_arrays(states, actions, outcomes[:, None], feature_names=["y"])
    model = ResidualModel(method="tabular").fit(logs)
    found = model.effect(np.arange(5.0)[:, None], action=1, baseline=0)
    np.testing.assert_allclose(found, 1, atol=1e-9)


def test_weighting_keeps_effects_that_bend_with_the_state():
    rng = np.random.default_rng(0)
    states, actions = rng.normal(size=(3000, 1)), rng.integers(2, size=3000)
    moved = np.stack([actions, (states[:, 0] ** 2 - 1) * actions], axis=1)
    features = (moved + 0.1 * rng.normal(size=moved.shape))[:, None]
    logs = Logs.from_arrays(states, actions, features, feature_names=["u", "v"])
    found = ResidualModel().fit(logs).effect([[0.0], [1.5]], action=1, baseline=0)
    np.testing.assert_allclose(found, [[1, -1], [1, 1.25]], atol=0.1)


def test_effects_along_the_noise_are_not_lost():
    """Two features that one noise shakes and one action moves, in units far apart."""
    rng = np.random.default_rng(0)
    states, actions = rng.normal(size=(3000, 1)), rng.integers(2, size=3000)
    shared, own = rng.normal(size=3000), 0.01 * rng.normal(size=(2, 3000))
    both = np.stack([actions + shared + own[0], 2 * actions + shared + own[1], np.ones(3000)], 1)
    features = (both * [1e3, 1e-3, 1])[:, None]
    logs = Logs.from_arrays(states, actions, features, feature_names=["u", "v", "constant"])
    found = ResidualModel().fit(logs).effect([[0.0]], action=1, baseline=0)
    np.testing.assert_allclose(found / [1e3, 1e-3, 1], [[1, 2, 0]], atol=0.1)


def test_a_card_says_that_nothing_was_seen():
    rng = np.random.default_rng(0)
    logs = Logs.from_arrays(
        rng.normal(size=(500, 2)), rng.integers(2, size=500), rng.normal(size=(500, 1, 3))
    )
    with pytest.warns(UserWarning, match="no effect stood out from the noise"):
        model = ResidualModel().fit(logs)
    assert "no effect stood out" in model.summary()


@pytest.mark.parametrize(("num", "size"), [(500, 0.8), (2000, 0.4), (20_000, 0.12)])
def test_an_effect_that_is_the_same_in_all_states_is_seen(num, size):
    """Of one feature in three, at eight or nine standard errors."""
    for seed in range(3):
        rng = np.random.default_rng(seed)
        states, actions = rng.normal(size=(num, 2)), rng.integers(2, size=num)
        features = rng.normal(size=(num, 1, 3))
        features[:, 0, 0] += states[:, 1] + size * actions
        logs = Logs.from_arrays(states, actions, features, propensities=[0.5, 0.5])
        found = ResidualModel().fit(logs).effect(states, action=1, baseline=0).mean(axis=0)
        assert abs(found[0] - size) < 3.5 * 2 / np.sqrt(num)
        assert np.abs(found[1:]).max() < 3.5 * 2 / np.sqrt(num)


@pytest.mark.parametrize("continuation", ["uniform", None])
def test_steps_of_logs_that_end_after_one(continuation):
    rng = np.random.default_rng(0)
    states, actions = rng.normal(size=(900, 1)), rng.integers(2, size=900)
    after = 0.9 * states + actions[:, None]
    logs = Logs.from_arrays(
        states,
        actions,
        after[:, None],
        feature_names=["x"],
        observation_names=["x"],
        features_are_next_observation=True,
        propensities=[0.5, 0.5],
        **({} if continuation is None else {"continuation": continuation}),
    )
    found = ResidualModel(**STEPS).fit(logs).effect([[0.0]], action=1, baseline=0)
    np.testing.assert_allclose(found, [[1.0]], atol=0.1)


def test_only_an_effect_model_has_a_scorer(direct, tmp_path):
    direct.save(tmp_path)
    with pytest.raises(ValueError, match=r"only an EffectModel has a scorer; .* kind 'residual'"):
        Scorer.load(tmp_path)
