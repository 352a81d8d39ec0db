"""Average effects from logs: estimates, intervals, subgroups, and what is refused."""

import numpy as np
import pytest

import cqm
from cqm.models import averages
from cqm.models.averages import average_effects


def confounded(num=600, seed=0, groups=None, **changes):
    """The sick are treated more often; treatment helps by 1, and by 2 where `old`."""
    rng = np.random.default_rng(seed)
    sick, old = rng.normal(size=num), rng.integers(2, size=num)
    propensity = 1 / (1 + np.exp(-sick))
    treated = (rng.random(num) < propensity).astype(int)
    health = -3 * sick + (1 + old) * treated + rng.normal(size=num)
    settings = {
        "action_names": ["leave", "treat"],
        "observation_names": ["sick", "old"],
        "feature_names": ["health"],
        "propensities": np.stack([1 - propensity, propensity], axis=1),
        "groups": groups,
        "discount": 1.0,
    }
    observations = np.stack([sick, old], axis=1)
    return cqm.Logs.from_arrays(
        observations, treated, health[:, None, None], **{**settings, **changes}
    )


@pytest.fixture(scope="module")
def found():
    return cqm.ResidualModel(members=1).average_effect(confounded(), by="old")


def test_confounding_is_removed(found):
    logs = confounded()
    outcomes, treated = logs.outcomes[:, 0], logs.first_actions == 1
    assert outcomes[treated].mean() < outcomes[~treated].mean()  # it looks harmful
    for group, truth in (
        ("all", 1 + logs.observations[:, 1].mean()),
        ("old = 0", 1),
        ("old = 1", 2),
    ):
        effect, error = found.contrast("treat", "leave", group)
        assert abs(effect[0] - truth) < 3 * error[0] < 0.6
    assert found.sizes.tolist() == [600, *np.bincount(logs.observations[:, 1].astype(int))]


def test_about_95_of_100_intervals_hold():
    held = []
    for seed in range(60):
        answer = cqm.ResidualModel(members=1, folds=2).average_effect(confounded(300, seed))
        truth = 1 + confounded(300, seed).observations[:, 1].mean()
        low, high = answer.interval("treat", "leave")
        held.append(low[0] <= truth <= high[0])
    assert 0.87 <= np.mean(held) <= 1


def test_contrasts_and_intervals_fit_together(found):
    effect, error = found.contrast(1, 0)
    back, same = found.contrast("leave", "treat")
    np.testing.assert_allclose([back, same], [-effect, error])
    low, high = found.interval(1, 0)
    np.testing.assert_allclose(high - low, 2 * found.multiplier * error)
    np.testing.assert_allclose((high + low) / 2, effect)
    assert found.contrast(1, 1)[1] == 0


def test_one_contrast_needs_no_longer_interval_than_a_normal_one():
    covariance = np.diag([1.0, 4.0])
    single = averages._multiplier([covariance], np.ones((1, 2), bool), 0.95)
    assert single == pytest.approx(1.96, abs=0.03)
    known = np.ones((3, 2), bool)
    several = averages._multiplier([covariance] * 3, known, 0.95)  # 0.95 ** (1 / 3) of a normal one
    assert several == pytest.approx(2.39, abs=0.03)
    known[1:, 0] = False  # a single contrast is left
    assert averages._multiplier([covariance] * 3, known, 0.95) == pytest.approx(1.96, abs=0.03)


def test_decisions_of_an_episode_count_as_one():
    logs = confounded(300)
    twice = logs[np.repeat(np.arange(300), 2)]
    apart = cqm.ResidualModel(members=1).average_effect(twice).contrast(1, 0)[1]
    episodes = cqm.Logs.from_arrays(
        twice.observations,
        twice.actions,
        twice.features,
        propensities=twice.propensities,
        groups=np.repeat(np.arange(300), 2),
        discount=1.0,
    )
    together = cqm.ResidualModel(members=1).average_effect(episodes).contrast(1, 0)[1]
    assert together / apart == pytest.approx(np.sqrt(2), rel=0.1)


def test_the_table_says_what_an_analyst_asks(found):
    text = str(found).splitlines()
    assert text[0] == "Average effects of the first action, from 600 decisions"
    assert text[1].split("  ")[0] == "group"
    assert "treat instead of leave" in text[2]
    assert "certain" in text[2]
    assert text[-2] == "With 95% confidence, all intervals hold at once."
    frame = found.to_pandas()
    assert frame["group"].tolist() == ["all", "old = 0", "old = 1"]
    effect, error = found.contrast("treat", "leave", "old = 1")
    row = frame.iloc[2]
    assert (row["effect"], row["standard_error"]) == (effect[0], error[0])
    assert row["low"] < row["effect"] < row["high"]
    assert found._repr_html_().count("<tr>") == 4


def test_labels_make_subgroups():
    logs = confounded(300)
    labels = np.where(logs.observations[:, 0] > 0, "severe", "mild")
    answer = cqm.ResidualModel(members=1).average_effect(logs, by=labels)
    assert answer.groups == ("all", "mild", "severe")
    assert answer.sizes.tolist() == [300, (labels == "mild").sum(), (labels == "severe").sum()]


def test_several_actions_and_outcomes():
    rng = np.random.default_rng(0)
    x, actions = rng.normal(size=(500, 1)), rng.integers(3, size=500)
    outcomes = np.stack([actions + x[:, 0], -2.0 * actions], axis=1) + rng.normal(size=(500, 2))
    logs = cqm.Logs.from_arrays(x, actions, outcomes[:, None], discount=1.0)
    answer = cqm.ResidualModel(members=1).average_effect(logs)
    assert answer.means.shape == (1, 3, 2)
    for action in (1, 2):
        effect, error = answer.contrast(action, 0)
        assert (np.abs(effect - [action, -2 * action]) < 4 * error).all()
    assert len(answer.rows()) == 6
    assert answer.multiplier > 2.2


@pytest.mark.parametrize(
    ("by", "message"),
    [
        (np.zeros(5), r"by must be one label per decision, 300 in all, or .*; got shape \[5\]"),
        ("sik", r"unknown observation 'sik'; did you mean \['sick'\]"),
        ("sick", "by has 300 different values; at most 100 subgroups"),
    ],
)
def test_subgroups_are_checked(by, message):
    with pytest.raises(ValueError, match=message):
        cqm.ResidualModel().average_effect(confounded(300), by=by)


def test_an_action_that_is_missing_in_a_subgroup_has_no_overlap_there():
    logs = confounded(300)
    by = np.where(logs.first_actions == 1, "all treated", "others")
    by[:100] = "both"
    with pytest.warns(UserWarning, match="action leave .* 100% of .* in the subgroup all treated"):
        answer = cqm.ResidualModel(members=1).average_effect(logs, by=by)
    signs = dict(zip(answer.groups, [row["sign"] for row in answer.rows()], strict=True))
    assert signs.pop("all treated") == signs.pop("others") == "no overlap"
    assert set(signs.values()) <= {"certain", "uncertain"}


def test_an_action_that_never_occurs_is_named():
    logs = confounded(300)
    only = logs[np.flatnonzero(logs.first_actions == 1)]
    with pytest.raises(ValueError, match=r"actions \[leave\] never occur, so their mean outcomes"):
        average_effects(
            cqm.ResidualModel(members=1),
            only,
            made=averages.CrossFitted(np.zeros((len(only), 2, 1)), only.propensities),
        )


@pytest.mark.parametrize("num", [300, 2000])
@pytest.mark.parametrize("rule", ["ward", "severity"])
def test_an_effect_without_overlap_is_not_estimated(num, rule):
    answer = not_identified(wards(num, rule=rule))
    assert not answer.identified.any()
    assert {row["sign"] for row in answer.rows()} == {"no overlap"}
    effect, error = answer.contrast("b", "a")
    assert np.isnan(effect).all()
    assert np.isposinf(error).all()
    low, high = answer.interval("b", "a")
    assert (low[0], high[0]) == (-np.inf, np.inf)
    assert answer.contrast("a", "a")[1] == 0
    assert str(answer).count("[-inf, inf]   no overlap") == 3
    assert answer.to_pandas()["sign"].tolist() == ["no overlap"] * 3


def test_the_warning_says_which_action_is_missing_where():
    with pytest.warns(UserWarning, match="no overlap") as told:
        cqm.ResidualModel(members=1, folds=2).average_effect(wards(300, rule="ward"))
    message = str(told[0].message)
    assert "action a never occurs in 210 decisions with ward = north, west (70% of all)" in message
    assert message.endswith("drop those decisions, or compare only actions that overlap")


def test_actions_that_overlap_can_still_be_compared():
    logs = wards(1200, rule="only c")
    answer = not_identified(logs)
    assert answer.identified.tolist() == [[True, True, False]]
    signs = {(row["action"], row["baseline"]): row["sign"] for row in answer.rows()}
    assert signs["b", "a"] in ("certain", "uncertain")
    assert signs["c", "a"] == signs["c", "b"] == "no overlap"
    assert answer.multiplier == pytest.approx(1.96, abs=0.03)  # of a single contrast


def wards(num, *, rule, seed=0):
    """Three arms without effect; the arm is decided by the ward or by the severity."""
    rng = np.random.default_rng(seed)
    ward, age, severity = rng.integers(3, size=num), rng.normal(60, 12, num), rng.normal(size=num)
    arm = {
        "ward": ward,
        "severity": np.digitize(severity, [-0.5, 0.5]),
        "only c": np.where(ward == 2, rng.integers(3, size=num), rng.integers(2, size=num)),
    }[rule]
    table = {
        "ward": np.array(["east", "north", "west"])[ward],
        "age": age,
        "severity": severity,
        "arm": np.array(["a", "b", "c"])[arm],
        "relief": 0.05 * age + 0.5 * severity + rng.normal(size=num),
    }
    return cqm.Logs.from_frame(
        table, observations=["ward", "age", "severity"], action="arm", outcomes=["relief"]
    )


def not_identified(logs):
    with pytest.warns(UserWarning, match="no overlap: action"):
        return cqm.ResidualModel(members=1, folds=2).average_effect(logs)


def test_few_decisions_with_an_action_are_told():
    logs = confounded(300)
    by = np.zeros(300, int)
    by[np.flatnonzero(logs.first_actions == 1)[:5]] = 1
    by[np.flatnonzero(logs.first_actions == 0)[:50]] = 1
    with pytest.warns(UserWarning, match="action treat was taken only 5 times in the subgroup 1"):
        cqm.ResidualModel(members=1).average_effect(logs, by=by)


def test_a_decision_with_a_huge_weight_is_told():
    logs = confounded(300)
    propensities = logs.propensities.copy()
    propensities[7, logs.first_actions[7]] = 0.01
    propensities[7, 1 - logs.first_actions[7]] = 0.99
    changed = logs.with_propensities(propensities)
    with pytest.warns(UserWarning, match="decision 7 stands for 100 decisions"):
        average_effects(cqm.ResidualModel(members=1), changed)


@pytest.mark.parametrize("confidence", [0, 1, 1.5, np.nan, "high"])
def test_confidence_is_a_share(confidence):
    with pytest.raises(ValueError, match="confidence must be"):
        cqm.ResidualModel().average_effect(confounded(300), confidence=confidence)
