import numpy as np
import pytest

from cqm.worlds.actions import candidate_actions, checked_actions, prototype_actions


def test_one_control_gets_its_bounds_and_their_middle():
    actions = prototype_actions(np.array([-2.0]), np.array([4.0]), name="anything", seed=3)
    assert actions.tolist() == [[-2.0], [1.0], [4.0]]


def test_more_controls_get_the_middle_and_two_antithetic_pairs_that_reach_the_bounds():
    low, high = np.array([-1.0, 0.0, -5.0]), np.array([1.0, 4.0, 5.0])
    actions = prototype_actions(low, high, name="box")
    assert actions.shape == (5, 3)
    assert actions[0].tolist() == [0.0, 2.0, 0.0]
    np.testing.assert_allclose(actions[1:3] + actions[3:5], 2 * actions[[0, 0]], atol=1e-15)
    relative = (actions[1:] - actions[0]) / [1.0, 2.0, 5.0]
    np.testing.assert_allclose(np.abs(relative).max(axis=1), 1.0, rtol=1e-15)
    assert np.linalg.matrix_rank(relative[:2]) == 2


def test_prototypes_are_fixed_by_name_and_seed():
    low, high = np.full(2, -1.0), np.full(2, 1.0)
    actions = prototype_actions(low, high, name="reacher-easy")
    np.testing.assert_array_equal(actions, prototype_actions(low, high, name="reacher-easy"))
    assert not np.array_equal(actions, prototype_actions(low, high, name="reacher-hard"))
    assert not np.array_equal(actions, prototype_actions(low, high, name="reacher-easy", seed=1))
    # The published numbers use exactly this set.
    pinned = [[-0.2957323557794643, -1.0], [1.0, 0.4503587522141783]]
    np.testing.assert_allclose(actions[1:3], pinned, rtol=0, atol=1e-12)


def test_prototypes_are_not_nearly_the_same_action():
    low, high = np.full(2, -1.0), np.full(2, 1.0)
    for seed in range(50):
        first, second = prototype_actions(low, high, name="box", seed=seed)[1:3]
        cosine = first @ second / np.linalg.norm(first) / np.linalg.norm(second)
        assert abs(cosine) <= np.sqrt(0.5)


@pytest.mark.parametrize(
    ("low", "high"),
    [([-np.inf], [np.inf]), ([-1.0, -1.0], [1.0, np.inf]), ([-1.0], [1.0, 1.0]), ([], [])],
)
def test_prototypes_need_a_bounded_box(low, high):
    with pytest.raises(ValueError, match="prototype actions need a bounded control box; got low="):
        prototype_actions(np.array(low), np.array(high))


LOW, HIGH = np.array([-1.0, 0.0]), np.array([1.0, 4.0])


def test_given_actions_are_checked_and_kept_and_prototypes_are_the_default():
    given = [[0, 1], [1, 4]]
    kept = candidate_actions(given, LOW, HIGH, name="box", seed=3)
    assert kept.tolist() == [[0.0, 1.0], [1.0, 4.0]]
    np.testing.assert_array_equal(
        candidate_actions(None, LOW, HIGH, name="box", seed=3),
        prototype_actions(LOW, HIGH, name="box", seed=3),
    )
    with pytest.raises(ValueError, match="candidate_actions cannot be"):
        candidate_actions([[0.0, 5.0], [0.0, 0.0]], LOW, HIGH, name="box", seed=3)


@pytest.mark.parametrize(
    "given",
    [[0.0, 1.0], [[0.0, 1.0]], [[0.0], [1.0]], [[0.0, 1.0], [0.0, 4.5]], [[0, 1], [0, np.nan]]],
)
def test_wrong_actions_are_refused_with_what_is_allowed(given):
    allowed = r"at least 2 rows of 2 numbers from \[-1.0, 0.0\] to \[1.0, 4.0\]"
    with pytest.raises(ValueError, match=rf"candidate_actions cannot be .*; allowed: {allowed}"):
        checked_actions(given, LOW, HIGH)


def test_discrete_actions_are_whole_numbers():
    assert checked_actions([[0, 1], [1, 2]], LOW, HIGH, continuous=False).shape == (2, 2)
    with pytest.raises(ValueError, match="at least 2 rows of 2 whole numbers from"):
        checked_actions([[0.0, 1.0], [0.5, 2.0]], LOW, HIGH, continuous=False)
