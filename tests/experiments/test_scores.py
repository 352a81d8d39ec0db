import pytest
from support.synthetic_run import write_scores

from cqm.experiments import published as paper
from cqm.experiments.methods import METHODS, Method
from cqm.experiments.scores import (
    MEASURES,
    PUBLISHED,
    against_paper,
    below_paper,
    best,
    difference,
    score,
    title_of,
)

REACHER = "reacher-easy"


def test_methods_that_tie_exactly_share_the_first_place(tmp_path):
    results = write_scores(tmp_path, {"cqm": [0.5, 0.7], "sf": [0.7, 0.5], "world": [0.6]})
    assert best(results, REACHER, "accuracy") == ["cqm", "world", "sf"]


def test_the_lowest_regret_is_the_best(tmp_path):
    results = write_scores(tmp_path, {"cqm": [0.2], "sf": [0.1], "world": [0.3]}, "regret")
    assert best(results, REACHER, "regret") == ["sf"]


def test_only_the_papers_learned_methods_are_ranked(tmp_path):
    scores = {"cqm": [0.5, 0.6], "oracle": [1, 1], "default": [1, 1], "unknown": [1, 1]}
    assert best(write_scores(tmp_path, scores), REACHER, "accuracy") == ["cqm"]


def test_differences_are_over_the_seeds_that_both_have(tmp_path):
    results = write_scores(tmp_path, {"cqm": [0.1, 0.2, 0.9], "cqm+effect": [0.3, 0.6]})
    change = difference(results, REACHER, "accuracy", "cqm+effect", "cqm")
    assert (change.mean, change.num) == (pytest.approx(0.3), 2)
    assert difference(results, REACHER, "accuracy", "cqm", "sf") is None


def test_effect_errors_are_of_methods_that_predict_vectors(tmp_path):
    scores = {"cqm": [0.1, 0.2], "direct": [0.1], "cqm+effect": [0.3], "unknown": [0.1]}
    results = write_scores(tmp_path, scores, "effect_nmse")
    assert score(results, REACHER, "direct", "effect_nmse") is None
    assert score(results, REACHER, "unknown", "effect_nmse") is None
    assert score(results, REACHER, "sf", "effect_nmse") is None  # did not run
    assert score(results, REACHER, "cqm", "effect_nmse").mean == pytest.approx(0.15)
    assert score(results, REACHER, "cqm+effect", "effect_nmse").mean == 0.3


@pytest.mark.parametrize(
    ("key", "methods"),
    [
        ("accuracy", ["cqm", "world", "sf", "direct", "task-td", "cocoa"]),
        ("effect_nmse", ["cqm", "world", "sf"]),
        ("absolute_nmse", ["world", "sf"]),
    ],
)
def test_a_measure_knows_its_methods(key, methods):
    assert MEASURES[key].methods == methods


def test_what_a_new_method_predicts_decides_its_measures(monkeypatch):
    for predicts, keys in (
        ("scores", set()),
        ("effects", {"effect_nmse", "excess_error"}),
        ("outcomes", {"effect_nmse", "excess_error", "absolute_nmse"}),
    ):
        monkeypatch.setitem(METHODS, "new", Method("new", "New", "x:New", predicts))
        defined = {key for key, measure in MEASURES.items() if measure.defined_for("new+whiten")}
        assert defined == keys | {
            *("accuracy", "regret", "correlation"),
            *("expected_accuracy", "expected_regret", "ceiling_share"),
        }
    assert title_of("new+whiten") == "New + whiten"
    assert title_of("unknown") == "unknown"


def test_measures_with_published_numbers():
    assert [measure.published for measure in PUBLISHED] == [
        *(paper.ACCURACY, paper.REGRET, paper.EFFECT_NMSE, paper.ABSOLUTE_NMSE, paper.CORRELATION)
    ]


def test_worse_than_the_papers_interval_though_intervals_overlap(tmp_path):
    # The paper has 0.3456 ± 0.0647 for SF and 0.2598 ± 0.0592 for World.
    results = write_scores(tmp_path, {"sf": [0.14, 0.24, 0.34], "world": [0.1, 0.21, 0.32]})
    accuracy = MEASURES["accuracy"]
    assert against_paper(results, REACHER, "sf", accuracy) == "agrees"
    assert below_paper(results, REACHER, "sf", accuracy)
    assert not below_paper(results, REACHER, "world", accuracy)
    assert against_paper(results, REACHER, "default", accuracy) == ""
    assert not below_paper(results, REACHER, "default", accuracy)
