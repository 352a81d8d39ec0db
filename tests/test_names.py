"""Names of actions: which are allowed, and how they are looked up."""

import numpy as np
import pytest

from cqm.names import action_indices, checked_action_names, counted_actions, shortened, unknown

NAMES = ("idle", "charge", "discharge")


def test_actions_without_names_are_called_by_their_numbers():
    assert checked_action_names(None, 3) == ("0", "1", "2")


@pytest.mark.parametrize("names", [NAMES, list(NAMES), np.array(NAMES), ("0", "4", "8")])
def test_names_become_a_tuple_of_text(names):
    checked = checked_action_names(names, 3)
    assert checked == tuple(names)
    assert {type(name) for name in checked} == {str}


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (("idle", "charge"), "allowed: 3 different names, one per candidate action"),
        (("idle", "idle", "charge"), "allowed: 3 different names"),
        (("idle", " ", "charge"), "none of them empty"),
        (("idle", 1, "charge"), "allowed: 3 different names"),
        ("abc", "cannot be 'abc'; allowed: 3 different names"),
        (("1", "0", "wait"), "action 0 has the number of another action as its name"),
        (("idle", "wait", "1"), "action 2 has the number of another action as its name"),
    ],
)
def test_ambiguous_names_are_refused(names, message):
    with pytest.raises(ValueError, match=message):
        checked_action_names(names, 3)


@pytest.mark.parametrize(
    ("given", "indices"),
    [
        ("charge", 1),
        (2, 2),
        (np.int16(2), 2),
        ("2", 2),  # as read from a CSV file
        (["discharge", "idle"], [2, 0]),
        (np.array([["charge"], ["idle"]]), [[1], [0]]),
        (np.array([2, 0], np.int8), [2, 0]),
        (["charge", 0], [1, 0]),
    ],
)
def test_names_indices_and_arrays_of_either(given, indices):
    found = action_indices(given, NAMES)
    assert found.tolist() == indices
    assert found.dtype.kind == "i"


def test_a_number_that_is_a_name_means_the_name():
    assert action_indices(["8", "1"], ("0", "4", "8")).tolist() == [2, 1]


def test_an_unknown_name_gets_a_hint():
    with pytest.raises(ValueError, match=r"unknown action 'chrge'; did you mean \['charge'") as e:
        action_indices(["idle", "chrge"], NAMES)
    assert "available: ['idle', 'charge', 'discharge']" in str(e.value)
    assert "did you mean" not in str(unknown("action", "x", NAMES))


def test_long_lists_of_names_are_shortened():
    assert shortened("abcdef") == "a, b, c, d, e, f"
    assert shortened("abcdefg") == "a, b, c, d, e, … g"
    assert counted_actions(NAMES) == "3 actions (idle, charge, discharge)"
    assert counted_actions(("0", "1", "2")) == "3 actions"
