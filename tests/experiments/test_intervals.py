import math
from dataclasses import replace

import pytest

from cqm.experiments.intervals import Estimate, compare, estimate, factor
from cqm.experiments.published import Published

NAN = math.nan


def test_a_mean_and_its_intervals_by_hand():
    ours = estimate([0.1, 0.2, 0.3, 0.4, 0.5])
    # The variance is 0.1/4 = 0.025, so the standard error √(0.025/5) = 0.0707107.
    assert (ours.num, ours.undefined) == (5, 0)
    assert ours.mean == pytest.approx(0.3)
    assert ours.error == pytest.approx(0.0707107, rel=1e-5)
    assert ours.half_width() == pytest.approx(0.138593, rel=1e-5)
    assert ours.half_width("student") == pytest.approx(2.776445 * 0.0707107, rel=1e-5)


def test_one_seed_has_no_interval():
    ours = estimate([0.5])
    assert ours.mean == 0.5
    assert math.isnan(ours.half_width())
    assert math.isnan(ours.half_width("student"))


def test_undefined_values_are_counted_and_left_out():
    ours = estimate([1.0, NAN, 3.0])
    assert (ours.mean, ours.error, ours.num, ours.undefined) == (2.0, 1.0, 2, 1)
    none = estimate([NAN, NAN])
    assert math.isnan(none.mean)
    assert (none.num, none.undefined) == (0, 2)


def test_an_infinite_score_stays_infinite():
    ours = estimate([1.0, math.inf])
    assert ours.mean == math.inf
    assert math.isnan(ours.half_width())


def test_an_unknown_interval_names_the_known():
    with pytest.raises(ValueError, match=r"'normal', 'student'"):
        factor(5, "bootstrap")


FIVE = Estimate(0.5, 0.01 / 1.96, 5)  # 0.5 ± 0.01, and ± 0.014166 by Student-t


@pytest.mark.parametrize(
    ("value", "half", "interval", "expected"),
    [
        (0.52, 0.01, "normal", "agrees"),  # they touch
        (0.5201, 0.01, "normal", "worse"),
        (0.4799, 0.01, "normal", "better"),
        (0.528, 0.01, "student", "agrees"),  # both are widened 1.4165 times
        (0.529, 0.01, "student", "worse"),
        (0.519, None, "normal", "agrees"),  # theirs is taken to be as wide as ours
        (0.521, None, "normal", "worse"),
        (0.521, None, "student", "agrees"),
    ],
)
def test_intervals_overlap_where_means_are_within_both_halves(value, half, interval, expected):
    published = Published(value, half, "", "")
    assert compare(FIVE, published, higher_is_better=True, interval=interval) == expected
    mirrored = {"better": "worse", "worse": "better"}.get(expected, expected)
    assert compare(FIVE, published, higher_is_better=False, interval=interval) == mirrored


def test_a_figure_of_one_seed_may_lie_as_far_out_as_one_of_ours():
    one = Published(0.532, None, "", "", num_seeds=1)  # 0.01 · (1 + √5) is 0.0324
    assert compare(FIVE, one, higher_is_better=True) == "agrees"
    assert compare(FIVE, replace(one, value=0.533), higher_is_better=True) == "worse"


def test_a_range_is_not_widened():
    published = Published(0.925, 0.01, "0.92–0.93", "", None)
    ours = Estimate(0.9361, 0.001 / 1.96, 5)
    assert compare(ours, published, higher_is_better=True, interval="normal") == "better"
    ours = Estimate(0.9369, 0.001 / 1.96, 5)
    assert compare(ours, published, higher_is_better=True, interval="student") == "better"


def test_one_seed_is_a_point_and_two_points_cannot_be_compared():
    one = estimate([0.5])
    assert compare(one, Published(0.51, 0.01, "", ""), higher_is_better=True) == "agrees"
    assert compare(one, Published(0.52, 0.01, "", ""), higher_is_better=True) == "worse"
    assert compare(one, Published(0.5, None, "", ""), higher_is_better=True) == ""
    undefined = estimate([NAN, NAN])
    assert compare(undefined, Published(0.5, 0.1, "", ""), higher_is_better=True) == ""
