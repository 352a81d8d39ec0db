"""What logs refuse, and how they say it."""

import numpy as np
import pytest
from support.logs import arrays

from cqm.logs.dataset import Logs


def changed(name, value):
    return {**arrays(), name: value}


def with_nan(values):
    values = values.copy()
    values[7] = np.nan
    return values


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            changed("observations", np.zeros((10, 2))),
            "must have the same length; got .*'features': 300",
        ),
        (changed("actions", [[0, 1], [1]]), "same number of steps; got 1 to 2 steps"),
        (changed("actions", np.zeros((300, 2))), "one action and one row of features per step"),
        (changed("actions", np.full((300, 3), 0.5)), "actions must be indices or names"),
        (
            {**changed("actions", np.full((300, 3), 5)), "num_actions": 2},
            r"candidate actions in 0\.\.1",
        ),
        (
            changed("observations", with_nan(arrays()["observations"])),
            "observations must be finite; got NaN or infinity in 1 of 300 trajectories, "
            "the first in row 7",
        ),
        (changed("features", with_nan(arrays()["features"])), "features must be finite"),
        ({**arrays(), "propensities": [0.0, 1.0]}, r"propensities must be in \(0, 1\]"),
        ({**arrays(), "propensities": [1.5, 0.5]}, r"propensities must be in \(0, 1\]"),
        ({**arrays(), "propensities": [np.nan, 0.5]}, r"propensities must be in \(0, 1\]"),
        ({**arrays(), "propensities": [0.5, 0.4]}, "must sum to 1; row 0 sums to 0.9"),
        ({**arrays(), "propensities": np.full((300, 3), 1 / 3)}, r"propensities must be \[n, act"),
        (
            {**arrays(), "propensities": np.full(300, 0.5)},
            r"not only of the one taken; got \[300\]",
        ),
        ({**arrays(), "propensities": 0.5}, r"not only of the one taken; got \[\]"),
        ({**arrays(), "continuation": [0.5, 0.4]}, "2 probabilities that sum to 1"),
        ({**arrays(), "continuation": [0.5, np.nan]}, "2 probabilities that sum to 1"),
        ({**arrays(), "continuation": [1.5, -0.5]}, "2 probabilities that sum to 1"),
        ({**arrays(), "continuation": [1 / 3] * 3}, "2 probabilities that sum to 1"),
        ({**arrays(), "continuation": 0.5}, "one probability per candidate action"),
        (
            {**arrays(), "num_actions": 3, "candidate_actions": [[0.0], [1.0]]},
            "num_actions is 3, but there are 2 candidate actions",
        ),
        (
            {**arrays(), "num_actions": 2.5},
            r"num_actions must be a whole number in \[2, 32768\]; got 2.5",
        ),
        ({**arrays(), "num_actions": 10**12}, r"in \[2, 32768\]; got 1000000000000"),
        (changed("actions", np.full((300, 3), 10**12)), "at most 32768 actions; got 1000000000001"),
        ({**arrays(), "candidate_actions": [[0.0], [np.nan]]}, "candidate_actions must be finite"),
        (
            {**arrays(), "candidate_actions": [0.0, 1.0]},
            r"must be \[actions, controls\]; got .*\[2\]",
        ),
        ({**arrays(), "candidate_actions": 2.0}, r"must be \[actions, controls\]; got .*\[\]"),
        ({**arrays(), "world": {"name": "plant"}}, r"a name and a kind; \['kind'\] is missing"),
        (changed("features", np.zeros((300, 3, 0))), "at least one feature"),
        ({**arrays(), "groups": 3}, r"groups must be \[n\]"),
        (changed("actions", np.zeros((300, 3), int)), "at least 2 actions; got 1"),
        (arrays(num=0), "contain no trajectories"),
        (changed("features", np.zeros((300, 3))), r"features must be \[n, horizon, features\]"),
    ],
)
def test_what_is_wrong_is_said(given, message):
    with pytest.raises(ValueError, match=message):
        Logs.from_arrays(**given)


def test_rows_and_propensities_are_replaced_by_fitting_ones_only():
    logs = Logs.from_arrays(**arrays())
    assert len(logs[[3, 5]]) == 2
    for rows in (3, np.int64(3), np.zeros((2, 2), int)):
        with pytest.raises(ValueError, match="only be indexed by slices or arrays of row numbers"):
            logs[rows]
    for wrong in (0.5, np.full(300, 0.5), np.full((300, 3), 1 / 3), np.full((1, 2), 0.5)):
        with pytest.raises(ValueError, match="not only of the one taken"):
            logs.with_propensities(wrong)


def test_continuous_actions_are_refused_with_the_reason():
    states, features = np.zeros((4, 1)), np.zeros((4, 1, 1))
    for actions, what in (
        (np.linspace(-1, 1, 4), "numbers with fractions"),
        (np.zeros((4, 1, 2)), r"controls \[n, horizon, controls\]"),
    ):
        with pytest.raises(
            ValueError, match=f"{what}.*identify the effects of continuous actions.*actions='box'"
        ):
            Logs.from_arrays(states, actions, features)
