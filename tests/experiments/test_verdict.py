"""What a run shows in sentences and cards."""

import re

import pytest
from support.synthetic_run import write_run, write_scores

from cqm.experiments.report.page import render
from cqm.experiments.report.verdict import cards, verdict
from cqm.experiments.results import load

FULL = {"states": 20_000, "test_states": 4_000, "training": {"updates": 4_000}}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return load(
        write_run(
            tmp_path_factory.mktemp("run"), domains=("reacher-easy", "walker-walk"), seeds=(7, 8)
        )
    )


def test_the_winner_whoever_it_is(tmp_path):
    scores = {"cqm": [0.6, 0.61, 0.59, 0.6, 0.6], "direct": [0.9, 0.91, 0.89, 0.9, 0.9]}
    sentences = verdict(write_scores(tmp_path, scores, **FULL))
    assert sentences[0] == (
        "Of the paper's methods, the most accurate is Direct value in 1 of 1 domains (Reacher). "
        "In the paper it is CQM-B. Leads over the runner-up that exceed their Student-t intervals: "
        "Direct value on Reacher."
    )
    assert "1 of 2 for accuracy" in sentences[1]
    assert sentences[1].endswith("by more than the intervals: CQM-B on Reacher.")
    assert "80% on Reacher" in sentences[2]
    assert len(sentences) == 3


def test_every_clear_lead_has_its_winner(tmp_path):
    high, low, near = [0.9, 0.91, 0.89], [0.6, 0.61, 0.59], [0.9, 0.88, 0.91]
    scores = {("reacher-easy", "cqm"): low, ("reacher-easy", "direct"): high}
    scores |= {("cheetah-run", "cqm"): high, ("cheetah-run", "direct"): low}
    scores |= {("walker-walk", "cqm"): high, ("walker-walk", "direct"): near}
    first = verdict(write_scores(tmp_path, scores, **FULL))[1]
    assert first.endswith("intervals: Direct value on Reacher and CQM-B on Cheetah.")


def test_all_who_share_the_first_place_are_named(tmp_path):
    scores = {method: [1.0, 1.0] for method in ("cqm", "cocoa")}
    scores |= {f"{method}+effect": [0.5, 0.5] for method in ("world", "sf", "direct", "task-td")}
    scores |= {f"{method}+effect": [1.0, 1.0] for method in ("cqm", "cocoa")}
    results = write_scores(tmp_path, scores, **FULL)
    assert [card.leader for card in cards(results)] == ["CQM-B and COCOA"]
    assert verdict(results)[-1].endswith("the most accurate is CQM-B and COCOA on Reacher.")


def test_a_lead_within_its_interval_is_none(tmp_path):
    scores = {"cqm": [0.5, 0.9], "direct": [0.6, 0.7]}
    assert "No lead over the runner-up" in " ".join(verdict(write_scores(tmp_path, scores, **FULL)))


def test_a_smaller_run_says_so_first(tmp_path):
    smaller = {**FULL, "states": 4_000, "training": {"updates": 1_000}}
    first, second, *_ = verdict(write_scores(tmp_path, {"cqm": [0.9]}, **smaller))
    assert "4,000 of 20,000 training states, 1,000 of 4,000 updates and 1 of 5 seeds" in first
    assert "With one seed, a lead may be chance." in second


def test_cards_show_the_best_and_how_far_it_gets(run):
    reacher, walker = cards(run)
    assert (reacher.title, walker.title) == ("Reacher", "Walker")
    assert 0 < reacher.accuracy <= 1
    assert walker.ceiling == pytest.approx(0.48, abs=0.01)
    assert re.fullmatch(r"\d+ of \d+ published numbers agree", walker.agreement)


def test_the_verdict_names_noise_rank_and_conditioning(run):
    text = " ".join(verdict(run))
    assert "63.0% is noise" in text
    assert "the rank accounts for at most 0.017" in text
    assert "With the same conditioned input for every method" in text
    assert "the default model's accuracy minus CQM-B's" in text


def test_without_methods_of_the_paper_nothing_is_claimed(tmp_path):
    results = write_scores(tmp_path, {"zero": [0.2] * 5}, **FULL)
    assert verdict(results) == []
    assert cards(results) == []
    assert "<h2>Verdict</h2>" in render(results, [], [])
