import numpy as np
import pytest

import cqm
from cqm.models import ridge
from cqm.models.controls import box_codes, box_controls, box_rule, centered_monomials
from cqm.models.preprocessing import Coordinates
from cqm.quotient import center
from cqm.worlds.function import FunctionWorld

LOW, HIGH = np.array([-1.0, 0.0]), np.array([3.0, 2.0])
STATES = np.random.default_rng(1).uniform(-0.5, 1.5, size=(20, 2))


def aiming_world(**changes):
    """The reward is highest if the control equals the state; nothing else matters."""

    def features(before, action, noise, after):
        return np.column_stack([np.sum(-((action - before) ** 2), axis=1), action[:, 0]])

    arguments = {
        "features": features,
        "candidate_actions": [[-1.0, 0.0], [1.0, 1.0], [3.0, 2.0]],
        "control_low": LOW,
        "control_high": HIGH,
        "feature_names": ["closeness", "first"],
        "observation_names": ["x", "y"],
        "name": "aiming",
    }
    return FunctionWorld(
        lambda x, u, e: x,
        lambda num, rng: rng.uniform(-0.5, 1.5, size=(num, 2)),
        **(arguments | changes),
    )


@pytest.fixture(scope="module")
def branches():
    settings = {"states": 400, "horizon": 2, "actions": "box", "arms": 4, "continuation": "box"}
    return cqm.collect(aiming_world(), **settings, warmup=(0, 0), per_step=True)


@pytest.fixture(scope="module")
def model(branches):
    return cqm.EffectModel(candidates=("constant", "ridge")).fit(branches)


@pytest.fixture(scope="module")
def network(branches):
    """A short fit of all candidates, so that a stack of networks may be chosen."""
    return cqm.EffectModel(candidates=("unrolled", "direct"), updates=40, width=16).fit(branches)


def exact_effects(states, controls):
    """Closeness relative to its mean over the box, `[n, actions]`."""
    close = -np.sum((controls - states[:, None]) ** 2, axis=-1)
    mean, spread = (LOW + HIGH) / 2, (HIGH - LOW) ** 2 / 12
    return close + np.sum((states - mean) ** 2 + spread, axis=1)[:, None]


def test_effects_of_any_control_are_centred_over_the_box(model):
    asked = np.array([[0.0, 0.5], [2.5, 1.9]])
    effects = model.effect(STATES, actions=asked)
    assert effects.shape == (20, 2, 2)
    np.testing.assert_allclose(effects[..., 0], exact_effects(STATES, asked), atol=0.02)
    np.testing.assert_allclose(effects[..., 1], asked[:, 0] - 1.0 + 0 * STATES[:, :1], atol=0.02)


def test_an_effect_does_not_depend_on_what_else_is_asked(model, network):
    asked = np.array([[0.0, 0.5], [2.5, 1.9], [1.0, 1.0]])
    for each in (model, network):
        alone = each.effect(STATES, actions=asked[:1])
        together = each.effect(STATES, actions=asked)[:, :1]
        np.testing.assert_allclose(alone, together, rtol=1e-4, atol=1e-5)


def test_centring_holds_for_the_rule_to_rounding(model, network):
    for each in (model, network):
        rule = box_controls(each.rule_, each.box_)
        effects = each.effect(STATES, actions=rule)
        assert np.abs(effects.mean(axis=1)).max() < 1e-5 * np.abs(effects).max()
        assert 0 < each.centering_gap(STATES) < 0.1


def test_every_state_may_have_controls_of_its_own(model, network):
    asked = np.random.default_rng(0).uniform(LOW, HIGH, size=(20, 3, 2))
    for each in (model, network):
        effects = each.effect(STATES, actions=asked)
        one = each.effect(STATES[7], actions=asked[7])
        np.testing.assert_allclose(effects[7], one, rtol=1e-4, atol=1e-5)


def test_candidate_actions_are_answered_as_controls(model):
    menu = aiming_world().candidate_actions
    np.testing.assert_allclose(model.effect(STATES), model.effect(STATES, actions=menu))
    query = cqm.Query.named({"closeness": 1.0}, aiming_world())
    expected = exact_effects(STATES, menu)
    np.testing.assert_array_equal(model.act(STATES, query), expected.argmax(axis=1))
    np.testing.assert_array_equal(model.rank(STATES, query), np.argsort(-expected, axis=1))
    np.testing.assert_allclose(model.advantage(STATES, query), expected, atol=0.02)


def test_the_best_control_in_the_box_is_found(model):
    query = cqm.Query.named({"closeness": 1.0}, aiming_world())
    decision = model.act(STATES, query, over="box")
    best = np.clip(STATES, LOW, HIGH)
    np.testing.assert_allclose(decision.controls, best, atol=0.15)
    menu = exact_effects(STATES, aiming_world().candidate_actions)
    gain = exact_effects(STATES, best[:, None])[:, 0] - menu.max(axis=1)
    np.testing.assert_allclose(decision.gain, gain, atol=0.05)
    assert (decision.menu_bound >= decision.gain).all()
    np.testing.assert_array_equal(decision.menu_action, menu.argmax(axis=1))
    assert "mean gain" in repr(decision)
    with pytest.raises(ValueError, match="calibrated on the box"):
        _ = decision.claimed


def test_calibrated_models_say_where_a_gain_exceeds_their_error(branches, tmp_path):
    model = cqm.EffectModel(candidates="ridge").fit(branches)
    settings = {"states": 40, "horizon": 2, "actions": "box", "arms": 4, "continuation": "box"}
    held_out = cqm.collect(aiming_world(), **settings, warmup=(0, 0), draws=16, seed=9)
    model.calibrate(held_out)
    query = cqm.Query.named({"closeness": 1.0}, aiming_world())
    decision = model.act(STATES, query, over="box")
    np.testing.assert_array_equal(decision.claimed, decision.gain > decision.radius)
    assert decision.claimed.mean() > 0.5
    with pytest.raises(ValueError, match="calibrated with random controls"):
        model.certify(STATES, query)
    model.save(tmp_path)
    with pytest.raises(ValueError, match="calibrated with random controls"):
        cqm.load_model(tmp_path).certify(STATES, query)
    menu = {**settings, "actions": "menu", "arms": None}
    model.calibrate(cqm.collect(aiming_world(), **menu, warmup=(0, 0), draws=16, seed=9))
    assert len(model.certify(STATES, query, shift="ignore").answers) == 20


def test_one_collection_is_enough_to_learn_from_the_box_and_to_calibrate(branches):
    model = cqm.EffectModel(candidates="ridge")
    model.fit(branches, calibration=0.1, world=aiming_world())
    query = cqm.Query.named({"closeness": 1.0}, aiming_world())
    assert model.act(STATES, query, over="box").claimed.any()


def test_the_menu_can_be_changed_without_a_refit(model, network, tmp_path):
    menu = np.array([[0.0, 0.0], [0.5, 1.5]])
    for name, each in (("a", model), ("b", network)):
        changed = each.with_actions(menu, names=["low", "high"])
        np.testing.assert_array_equal(changed.effect(STATES), each.effect(STATES, actions=menu))
        contrast = changed.effect(STATES, action="high", baseline="low")
        np.testing.assert_allclose(contrast, np.diff(changed.effect(STATES), axis=1)[:, 0])
        changed.save(tmp_path / name)
        again = cqm.load_model(tmp_path / name)
        np.testing.assert_array_equal(again.effect(STATES), changed.effect(STATES))
        assert again.action_names_ == ("low", "high")


def test_saved_models_and_scorers_answer_alike(model, network, tmp_path):
    for name, each in (("a", model), ("b", network)):
        each.save(tmp_path / name)
        again = cqm.EffectModel.load(tmp_path / name)
        asked = np.array([[0.0, 0.5]])
        np.testing.assert_array_equal(
            again.effect(STATES, actions=asked), each.effect(STATES, actions=asked)
        )
        scorer = cqm.models.Scorer.load(tmp_path / name)
        np.testing.assert_allclose(scorer.effect(STATES), each.effect(STATES), atol=1e-4)


def test_a_reference_on_the_menu_is_possible_after_fitting(model):
    menu = aiming_world().candidate_actions
    weights = np.array([0.5, 0.3, 0.2])
    effects = model.recenter(weights).effect(STATES, actions=menu)
    np.testing.assert_allclose(np.einsum("a,naf->nf", weights, effects), 0, atol=1e-9)
    np.testing.assert_allclose(np.diff(effects, axis=1), np.diff(model.effect(STATES), axis=1))


def test_rewards_and_measures_are_centred_over_the_box(network):
    values = network.reward_advantage(STATES[:3], lambda features: features[..., 0], draws=8)
    assert values.shape == (3, 3)
    measure = network.effect_measure(STATES[0], action=1, draws=4)
    assert abs(measure.weights.sum()) < 1e-12


@pytest.mark.parametrize(
    ("actions", "message"),
    [
        ([[5.0, 0.0]], r"actions must be from \[-1.0, 0.0\] to \[3.0, 2.0\]; got \[5.0, 0.0\]"),
        ([[np.nan, 0.0]], "actions must be from"),
        ([0.0, 1.0], "actions must be controls"),
        (np.zeros((3, 1, 2)), r"one set per state \[20, actions, 2\]"),
        (np.zeros((0, 2)), "actions must be controls"),
    ],
)
def test_wrong_controls_are_explained(model, actions, message):
    with pytest.raises(ValueError, match=message):
        model.effect(STATES, actions=actions)


def test_what_is_not_possible_is_explained(model, branches):
    with pytest.raises(ValueError, match="at least 2 rows"):
        model.with_actions([[0.0, 0.0]])
    with pytest.raises(ValueError, match="got both"):
        model.effect(STATES, actions=[[0.0, 0.0]], action=0, baseline=1)
    with pytest.raises(ValueError, match="over must be"):
        model.act(STATES, [1.0, 0.0], over="boxes")
    with pytest.raises(ValueError, match="the model has 2 features"):
        model.act(STATES, np.ones(3), over="box")
    with pytest.raises(ValueError, match="call recenter"):
        model.recenter([0.5, 0.3, 0.2]).with_actions([[0.0, 0.0], [1.0, 1.0]])
    with pytest.raises(ValueError, match="a reference is over candidate actions"):
        cqm.EffectModel(reference=[0.5, 0.3, 0.2]).fit(branches)
    with pytest.raises(ValueError, match="needs conditioning='learned'"):
        cqm.EffectModel.paper().fit(branches)
    menu = cqm.collect(aiming_world(), states=40, horizon=2)
    plain = cqm.EffectModel(candidates="constant").fit(menu)
    for ask in (
        lambda: plain.effect(STATES, actions=[[0.0, 0.0]]),
        lambda: plain.act(STATES, [1.0, 0.0], over="box"),
        lambda: plain.with_actions([[0.0, 0.0], [1.0, 1.0]]),
    ):
        with pytest.raises(ValueError, match="collected with actions='box'"):
            ask()


def test_pendulum_takes_any_torque():
    world = cqm.load_world("Pendulum-v1")
    branches = cqm.collect(world, states=300, actions="box", continuation="box", seed=0)
    model = cqm.EffectModel(candidates="ridge").fit(branches)
    states = branches.observations[:4]
    assert model.effect(states, actions=[[-1.3], [0.2]]).shape[:2] == (4, 2)
    query = cqm.Query.vector(np.eye(len(world.feature_names))[0], world)
    controls = model.act(states, query, over="box").controls
    assert controls.shape == (4, 1)
    assert np.abs(controls).max() <= 2


def test_codes_and_rules():
    box = np.stack([LOW, HIGH])
    controls = np.random.default_rng(0).uniform(LOW, HIGH, size=(7, 2))
    np.testing.assert_allclose(box_controls(box_codes(controls, box), box), controls)
    rule = box_rule(3)
    assert rule.shape == (64, 3)
    assert np.mean(np.sum(rule**2, axis=1)) == pytest.approx(1, abs=0.02)
    many = box_codes(np.random.default_rng(0).uniform(LOW, HIGH, size=(100_000, 2)), box)
    assert np.abs(centered_monomials(many).mean(axis=0)).max() < 0.01


def test_a_menu_that_later_actions_come_from_cannot_change(branches):
    settings = {"states": 60, "horizon": 2, "actions": "box", "arms": 3, "warmup": (0, 0)}
    followed = cqm.collect(aiming_world(), **settings, per_step=True)
    unrolled = cqm.EffectModel(candidates="unrolled", updates=20, width=8).fit(followed)
    with pytest.raises(ValueError, match="continuation='box'"):
        unrolled.with_actions([[0.0, 0.0], [1.0, 1.0]])


def test_a_changed_menu_is_calibrated_with_branches_of_that_menu(model):
    menu = np.array([[0.0, 0.0], [2.0, 1.0], [0.5, 1.5]])
    changed = model.with_actions(menu)
    settings = {"states": 30, "horizon": 2, "continuation": "box", "warmup": (0, 0), "draws": 16}
    with pytest.raises(ValueError, match="other candidate actions than the model"):
        changed.calibrate(cqm.collect(aiming_world(), **settings, seed=5))
    other = aiming_world(candidate_actions=menu)
    changed.calibrate(cqm.collect(other, **settings, seed=5))
    assert changed.calibration_.excess_error < 1e-3
    assert model.calibration_ is None


def test_a_calibration_on_the_menu_makes_no_claims_about_the_box(branches):
    model = cqm.EffectModel(candidates="ridge").fit(branches)
    settings = {"states": 30, "horizon": 2, "continuation": "box", "warmup": (0, 0), "draws": 16}
    model.calibrate(cqm.collect(aiming_world(), **settings, seed=5))
    decision = model.act(STATES, cqm.Query.named({"closeness": 1.0}, aiming_world()), over="box")
    assert decision.radius is None


def test_many_controls_and_states_are_answered_in_blocks(model, monkeypatch):
    query = cqm.Query.named({"closeness": 1.0}, aiming_world())
    asked = np.random.default_rng(0).uniform(LOW, HIGH, size=(20, 2, 2))
    whole = model.effect(STATES, actions=asked), model.act(STATES, query, over="box").controls
    monkeypatch.setattr("cqm.models.box_effects._STATES", 7)
    np.testing.assert_allclose(model.effect(STATES, actions=asked), whole[0], atol=1e-9)
    np.testing.assert_allclose(model.act(STATES, query, over="box").controls, whole[1], atol=1e-6)


def test_many_observations_and_controls_make_a_regression_of_bounded_size(monkeypatch):
    monkeypatch.setattr(ridge, "_PRODUCTS", 200)
    rng, num_controls = np.random.default_rng(0), 4
    coordinates = Coordinates(np.zeros(30), np.eye(30))
    codes, observations = rng.normal(size=(120, 5, num_controls)), rng.normal(size=(120, 30))
    labels = center(codes[..., :1] * observations[:, :1, None])
    menu = codes[0]
    predictor = ridge.polynomial_predictor(
        coordinates, observations, codes, labels, np.eye(1), menu, seed=0, transform=np.eye(30)
    )
    num_monomials = num_controls * (num_controls + 3) // 2
    assert predictor.weights.shape == (num_monomials, 1 + 2 * (200 // num_monomials), 1)
    predicted = center(predictor(observations, codes)[0])
    assert np.mean((predicted - labels) ** 2) < 0.05 * np.mean(labels**2)


def test_three_families_are_too_few_to_compare_penalties_but_enough_to_fit():
    branches = cqm.collect(aiming_world(), states=3, horizon=2, actions="box", continuation="box")
    model = cqm.EffectModel(candidates="ridge", validation=0).fit(branches)
    assert np.isfinite(model.effect(STATES, actions=[[0.0, 0.5], [2.5, 1.9]])).all()
