"""Overlap: what counts as a lack of it, and what does not."""

import numpy as np
import pytest

from cqm.columns import Column
from cqm.logs.overlap import few_values, measure_overlap
from cqm.rows import Rows


def measured(actions, propensities, observations=None, columns=(), *, names=(), known=True):
    """Overlap of actions whose propensities are given for the second of two."""
    rows = Rows.of(
        observations=np.empty((len(actions), 0)) if observations is None else observations,
        taken=np.eye(2)[actions],
        propensities=np.stack([1 - propensities, propensities], axis=1),
        block=64,
    )
    values = few_values(rows, names, columns)
    return measure_overlap(rows, ["no", "yes"], values, known=known)


def test_an_action_that_is_never_taken_in_a_tenth_of_the_decisions_lacks_overlap():
    propensities = np.where(np.arange(1000) < 100, 0.001, 0.5)
    actions = (np.arange(1000) >= 100) & (np.arange(1000) % 2 == 0)
    overlap = measured(actions.astype(int), propensities)
    assert overlap.lacking().tolist() == [0, 0.1]
    assert overlap.lacking(np.arange(100, 1000)).tolist() == [0, 0]
    assert overlap.lacking(np.arange(100)).tolist() == [0, 1]
    with pytest.warns(
        UserWarning, match=r"action yes .* \(propensity 0.01 or less\) in 10% of the"
    ):
        overlap.warn({"": overlap.lacking()})
    overlap.warn({"": np.zeros(2)})


def test_a_gap_of_a_twentieth_is_tolerated():
    propensities = np.where(np.arange(1000) < 50, 0.001, 0.5)
    actions = (np.arange(1000) >= 50) & (np.arange(1000) % 2 == 0)
    assert measured(actions.astype(int), propensities).lacking().tolist() == [0, 0]


def test_an_action_that_is_taken_often_enough_overlaps_however_rare_it_is():
    propensities = np.where(np.arange(20_000) < 10_000, 0.005, 0.5)
    actions = np.where(
        np.arange(20_000) < 10_000, np.arange(20_000) % 200 == 0, np.arange(20_000) % 2
    )
    assert measured(actions, propensities).lacking().tolist() == [0, 0]


def test_an_action_that_is_equally_rare_everywhere_overlaps():
    actions = (np.arange(2000) % 100 == 0).astype(int)  # 20 times
    for known in (True, False):
        assert measured(actions, np.full(2000, 0.01), known=known).lacking().tolist() == [0, 0]


def test_rare_actions_of_known_probability_overlap_if_they_were_taken_at_all():
    """Known propensities can be trusted, as in logs of a policy that seldom explores."""
    propensities = np.where(np.arange(2000) < 1000, 0.01, 0.5)
    actions = np.where(np.arange(2000) < 1000, np.arange(2000) % 100 == 0, np.arange(2000) % 2)
    assert measured(actions, propensities).lacking().tolist() == [0, 0]
    assert measured(actions, propensities, known=False).lacking().tolist() == [0, 0.5]


def test_small_estimates_that_the_counts_contradict_are_no_evidence():
    propensities = np.where(np.arange(1000) < 100, 0.005, 0.5)
    actions = np.arange(1000) % 2
    actions[:100] = np.arange(100) % 25 == 0  # 4 in 100
    assert measured(actions, propensities, known=False).lacking().tolist() == [0, 0]


def test_values_with_which_an_action_never_occurs():
    names, ward = ["ward=B", "ward=C", "floor"], np.arange(300) % 3
    observations = np.stack([ward == 1, ward == 2, np.arange(300) // 100], axis=1).astype(float)
    columns = [Column("ward", ("A", "B", "C")), Column("floor")]
    actions = np.where(ward == 1, np.arange(300) // 3 % 2, 0)
    smooth = np.full(300, 1 / 6)  # estimates that show nothing
    overlap = measured(actions, smooth, observations, columns, names=names, known=False)
    assert {name: own.names for name, own in overlap.values.items()} == {
        "ward": ("A", "B", "C"),
        "floor": ("0", "1", "2"),
    }
    [gap] = overlap.gaps
    assert (gap.action, gap.place) == (1, "200 decisions with ward = A, C")
    assert overlap.lacking() == pytest.approx([0, 2 / 3])


def test_chance_leaves_no_gaps():
    rng, alarms = np.random.default_rng(0), 0
    for _ in range(40):
        observations = rng.integers(6, size=(400, 5)).astype(float)
        actions = (rng.random(400) < 0.08).astype(int)
        found = measured(actions, np.full(400, 0.08), observations, names="abcde", known=False)
        assert len(found.values) == 5
        alarms += bool(found.gaps)
    assert alarms <= 4
    assert few_values(Rows.of(observations=rng.normal(size=(400, 1))), ["a"], ()) == {}
