"""Coverage: what it finds in logs that lack overlap, and what it accepts."""

import numpy as np
import pytest
from support.logs import arrays

from cqm.logs.dataset import Logs


def test_even_choices_are_covered():
    coverage = Logs.from_arrays(**arrays(num=2000), propensities=[0.5, 0.5]).coverage()
    assert coverage.problems == []
    coverage.check()
    np.testing.assert_allclose(coverage.frequencies, 0.5, atol=0.05)
    assert coverage.regions.shape == (20, 2)
    assert (coverage.effective_sample_sizes > 900).all()
    assert "no problems found" in str(coverage)


def test_actions_are_called_by_their_names():
    given = arrays(num=2000)
    given["actions"][:, 0] = given["observations"][:, 0] > 0
    logs = Logs.from_arrays(**given, action_names=("wait", "charge"))
    lines = str(logs.coverage()).splitlines()
    assert (
        " ".join(lines[1].split()) == "action frequency range over 20 regions effective sample size"
    )
    assert [line.split()[0] for line in lines[2:4]] == ["wait", "charge"]
    assert "problem: action wait makes up 0.00% of the 100 decisions in region 1" in "\n".join(
        lines
    )
    given["actions"][:, 0] = 1
    with pytest.raises(ValueError, match=r"actions \[wait\] never occur"):
        Logs.from_arrays(**given, action_names=("wait", "charge")).coverage().check()


def test_actions_that_depend_on_the_state_lack_overlap():
    given = arrays(num=2000)
    given["actions"][:, 0] = given["observations"][:, 0] > 0  # one action on either side
    coverage = Logs.from_arrays(**given).coverage()
    assert coverage.regions.min() == 0
    with pytest.warns(
        UserWarning, match=r"action \d makes up 0.00% of the \d+ decisions in region"
    ):
        coverage.check()


@pytest.mark.parametrize("propensities", [None, [0.5, 0.5]])
def test_a_lack_of_overlap_that_no_line_shows(propensities):
    given = arrays(num=2000)
    given["observations"] = np.random.default_rng(1).normal(size=(2000, 7))
    given["actions"][:, 0] = np.abs(given["observations"][:, 6]) > 0.67
    coverage = Logs.from_arrays(**given, propensities=propensities).coverage()
    assert coverage.regions.min() == 0
    with pytest.warns(
        UserWarning, match=r"action \d makes up 0.00% of the 100 decisions in region 1"
    ):
        coverage.check()
    told = "where its propensity is 50.00%" in " ".join(coverage.problems)
    assert told == (propensities is not None)
    if propensities is None:
        assert coverage.smallest_propensity == 0


def test_propensities_that_contradict_the_actions():
    rng, given = np.random.default_rng(2), arrays(num=2000)
    given["actions"][:, 0] = rng.random(2000) < 0.9
    right = Logs.from_arrays(**given, propensities=[0.1, 0.9])
    assert right.coverage().problems == []
    swapped = right.with_propensities([0.9, 0.1]).coverage()
    assert any("of the 2000 decisions, where its propensity is" in p for p in swapped.problems)
    # On average they are right, but not where the first observation is large.
    propensities = np.where(given["observations"][:, :1] > 0, [[0.3, 0.7]], [[0.7, 0.3]])
    given["actions"][:, 0] = rng.random(2000) < propensities[:, 0]
    turned = Logs.from_arrays(**given, propensities=propensities).coverage()
    assert turned.frequencies[0] == pytest.approx(propensities[:, 0].mean(), abs=0.05)
    assert any("in region" in p and "where its propensity is" in p for p in turned.problems)


def test_nothing_observed_is_one_region():
    given = {**arrays(num=2000), "observations": np.empty((2000, 0))}
    coverage = Logs.from_arrays(**given).coverage()
    assert coverage.regions.shape == (1, 2)
    assert coverage.problems == [
        "all observations are the same, so effects cannot depend on the state"
    ]


def test_rare_propensities_leave_a_small_sample():
    given = arrays(num=2000)
    propensities = np.tile([0.5, 0.5], (2000, 1))
    propensities[:20] = [0.999, 0.001]
    given["actions"][:20, 0] = 1
    coverage = Logs.from_arrays(**given, propensities=propensities).coverage()
    assert coverage.effective_sample_sizes[1] < 40 < coverage.effective_sample_sizes[0]
    with pytest.warns(UserWarning, match="action 1 has an effective sample size of"):
        coverage.check()


def test_an_action_that_never_occurs_is_an_error():
    coverage = Logs.from_arrays(**arrays(), num_actions=3).coverage()
    with pytest.raises(ValueError, match=r"actions \[2\] never occur among 300 decisions"):
        coverage.check()


def test_a_small_estimated_propensity_is_a_problem():
    order = np.random.default_rng(0).permutation(2000)
    states, actions = (np.arange(2000) < 100)[order, None], np.arange(2000)[order] % 2
    actions[states[:, 0]] = 0
    actions[order == 50] = 1  # once in 100 decisions of one kind
    coverage = Logs.from_arrays(states, actions, actions[:, None, None] + 0.0).coverage()
    assert coverage.smallest_propensity == 0.01
    assert coverage.problems == ["action 1 makes up 1.00% of the 100 decisions in region 1 of 20"]
    assert "no problems found" not in str(coverage)


def test_whatever_is_shown_as_small_is_reported_and_chance_is_not():
    alarms = 0
    for seed in range(40):
        rng = np.random.default_rng(seed)
        actions = (rng.random(2600) < 0.05).astype(int)
        logs = Logs.from_arrays(rng.normal(size=(2600, 2)), actions, actions[:, None, None] + 0.0)
        coverage = logs.coverage()
        assert coverage.problems or coverage.smallest_propensity > 0.01
        alarms += bool(coverage.problems)
    # In 10 of the 40, the action is taken at most once among the 130 decisions of some region.
    assert alarms <= 4


def test_the_column_and_value_without_an_action_are_named():
    rng = np.random.default_rng(0)
    ward = rng.choice(["east", "north", "west"], size=1000)
    arm = np.where(ward == "east", "a", rng.choice(["a", "b"], size=1000))
    table = {"ward": ward, "age": rng.normal(size=1000), "arm": arm, "y": rng.normal(size=1000)}
    logs = Logs.from_frame(table, observations=["ward", "age"], action="arm", outcomes=["y"])
    coverage, num = logs.coverage(), (ward == "east").sum()
    assert coverage.problems[0] == f"action b never occurs in the {num} decisions with ward = east"
    assert "in region" not in " ".join(coverage.problems)
    assert coverage.effective_sample_sizes[0] > 500
    assert coverage.effective_sample_sizes[1] == 0
    assert str(coverage).splitlines()[3].endswith("0 (no overlap)")
    assert coverage.to_json()["gaps"] == ("", f"{num} decisions with ward = east")


def test_the_effective_sample_size_shows_a_lack_of_overlap():
    given = arrays(num=2000)
    given["actions"][:, 0] = given["observations"][:, 0] > 0
    assert Logs.from_arrays(**given).coverage().effective_sample_sizes.tolist() == [0, 0]


def test_an_action_that_is_rare_everywhere_is_reported():
    actions = (np.arange(40_000) % 125 == 0).astype(int)
    states = np.random.default_rng(0).normal(size=(40_000, 2))
    problems = Logs.from_arrays(states, actions, actions[:, None, None] + 0.0).coverage().problems
    assert any("action 1 makes up 0." in problem for problem in problems)


def test_a_known_propensity_of_one_in_a_hundred_is_reported():
    given = arrays(num=2000)
    propensities = np.tile([0.5, 0.5], (2000, 1))
    propensities[0] = [0.99, 0.01]
    given["actions"][0, 0] = 0
    coverage = Logs.from_arrays(**given, propensities=propensities).coverage()
    assert coverage.problems == ["the smallest propensity is 0.01"]
