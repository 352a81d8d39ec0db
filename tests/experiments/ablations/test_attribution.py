import math

import pytest

from cqm.experiments.ablations.attribution import FACTORS, PARTS, attribution, shapley

ROWS = [
    ("cqm", 100, 0.5),
    ("cqm+effect", 100, 0.2),
    ("cqm-full-rank", 100, 0.45),
    ("cqm-full-rank+effect", 100, 0.1),
    ("cqm", 500, 0.4),
    ("cqm+effect", 500, 0.15),
    ("cqm-full-rank", 500, 0.35),
    ("cqm-full-rank+effect", 500, 0.05),
]


def rows(seeds=(7,), shift=0.0):
    keys = {"domain": "walker-walk", "draws": 1.0}
    for seed in seeds:
        for method, states, value in ROWS:
            row = {"seed": seed, "states": float(states), "method": method}
            yield {**keys, **row, "measure": "excess_error", "value": value + shift * (seed - 8)}
        limit = {"seed": seed, "states": math.nan, "method": "limit"}
        yield {**keys, **limit, "measure": "noise_floor", "value": 0.6}


def test_factors_without_interaction_keep_their_own_effect():
    errors = {
        frozenset(s): 1.0 - 0.3 * ("a" in s) - 0.2 * ("b" in s) - 0.1 * ("c" in s)
        for s in ("", "a", "b", "c", "ab", "ac", "bc", "abc")
    }
    assert shapley(errors) == pytest.approx({"a": 0.3, "b": 0.2, "c": 0.1})


def test_equal_factors_share_what_they_achieve_together():
    errors = {frozenset(): 1.0, frozenset("a"): 1.0, frozenset("b"): 1.0, frozenset("ab"): 0.0}
    assert shapley(errors) == pytest.approx({"a": 0.5, "b": 0.5})


def test_a_missing_set_of_factors_is_named():
    with pytest.raises(ValueError, match=r"missing: \[\{'b'\}\]"):
        shapley({frozenset(): 1.0, frozenset("a"): 0.5, frozenset("ab"): 0.2})


def test_parts_add_up_to_the_error_of_the_papers_model():
    parts = attribution(rows(), "walker-walk")
    assert tuple(parts) == PARTS
    assert math.fsum(parts.values()) == pytest.approx(0.6 + 0.4 * 0.5)
    assert parts["label noise"] == 0.6
    assert parts["network and training"] == pytest.approx(0.4 * 0.05)
    assert max(FACTORS, key=parts.__getitem__) == "preprocessing"


def test_means_over_seeds_are_attributed():
    together = attribution(rows(seeds=(7, 8, 9), shift=0.01), "walker-walk")
    assert together == pytest.approx(attribution(rows(), "walker-walk"))


def test_nothing_is_attributed_without_all_models():
    some = [row for row in rows() if row["method"] != "cqm-full-rank"]
    assert attribution(some, "walker-walk") == {}
    assert attribution(rows(), "cheetah-run") == {}
    assert attribution([], "walker-walk") == {}
