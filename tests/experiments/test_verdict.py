"""What a run shows in sentences."""

import pytest
from support.synthetic_run import write_run, write_scores

from cqm.experiments.report.page import render
from cqm.experiments.report.verdict import findings, headline
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
    assert headline(write_scores(tmp_path, scores, **FULL)) == {
        "What was run": "The paper's benchmark: 2 learned methods on Reacher, up to 5 seeds each.",
        "Who wins": "Most accurate of the paper's methods: Direct value on Reacher (in the paper: "
        "CQM-B). The lead over the runner-up is statistically clear (95%, Student-t) on Reacher.",
        "How close to the best achievable": "Outcomes are noisy, so even a perfect model only "
        "reaches the ceiling. As a share of the distance from chance to the ceiling, CQM-B reaches "
        "20% on Reacher.",
        "Against the paper": "1 of 2 published numbers agree within the intervals, 0 are better "
        "here and 1 worse. CQM-B is less accurate than published on Reacher (0.600 instead of "
        "0.955).",
    }


def test_methods_beyond_the_paper_win_apart_from_it(tmp_path):
    high, low = [0.9, 0.91, 0.89], [0.6, 0.61, 0.59]
    scores = {("reacher-easy", "cqm"): low, ("reacher-easy", "default"): high}
    scores |= {("walker-walk", "cqm"): low, ("walker-walk", "default"): high}
    scores |= {("cheetah-run", "cqm"): high, ("cheetah-run", "default"): low}
    assert headline(write_scores(tmp_path, scores, **FULL))["Who wins"].startswith(
        "Most accurate: the default model on Reacher and Walker; CQM-B on Cheetah. Most accurate "
        "of the paper's methods: CQM-B on Reacher, Walker and Cheetah (in the paper: CQM-B)."
    )


def test_every_clear_lead_is_named(tmp_path):
    high, low, near = [0.9, 0.91, 0.89], [0.6, 0.61, 0.59], [0.9, 0.88, 0.91]
    scores = {("reacher-easy", "cqm"): low, ("reacher-easy", "direct"): high}
    scores |= {("cheetah-run", "cqm"): high, ("cheetah-run", "direct"): low}
    scores |= {("walker-walk", "cqm"): high, ("walker-walk", "direct"): near}
    text = headline(write_scores(tmp_path, scores, **FULL))["Who wins"]
    assert text.endswith("is statistically clear (95%, Student-t) on Reacher and Cheetah.")


def test_ties_are_named_and_long_ones_cut_short(tmp_path):
    scores = {method: [1.0, 1.0] for method in ("cqm", "cocoa")}
    text = headline(write_scores(tmp_path, scores, **FULL))["Who wins"]
    assert "methods: CQM-B and COCOA on Reacher (in" in text
    scores |= {method: [1.0, 1.0] for method in ("sf", "direct", "default")}
    text = headline(write_scores(tmp_path, scores, **FULL))["Who wins"]
    assert text.startswith("Most accurate: the default model, CQM-B and 3 others on Reacher.")


def test_a_lead_within_its_interval_is_none(tmp_path):
    scores = {"cqm": [0.5, 0.9], "direct": [0.6, 0.7]}
    text = headline(write_scores(tmp_path, scores, **FULL))["Who wins"]
    assert text.endswith("No lead over the runner-up is statistically clear (95%, Student-t).")


def test_a_smaller_run_says_so_first(tmp_path):
    smaller = {**FULL, "states": 4_000, "training": {"updates": 1_000}}
    told = headline(write_scores(tmp_path, {"cqm": [0.9]}, **smaller))
    assert told["What was run"] == (
        "The paper's benchmark: 1 learned method on Reacher, one seed. Smaller than the paper's "
        "experiment (4,000 of 20,000 training states, 1,000 of 4,000 updates and 1 of 5 seeds), "
        "so expect differences."
    )
    assert told["Who wins"].endswith("With one seed, a lead may be chance.")
    assert "agree within the paper's intervals" in told["Against the paper"]


def test_only_the_whole_way_is_all_of_it(tmp_path):
    scores = {("reacher-easy", "cqm"): [0.999], ("walker-walk", "cqm"): [1.0]}
    text = headline(write_scores(tmp_path, scores, **FULL))["How close to the best achievable"]
    assert text.endswith("CQM-B reaches 99% on Reacher and 100% on Walker.")


def test_the_verdict_on_logs_compares_with_branches(run):
    assert headline(run)["From logs"].endswith(
        "(in brackets: from branches of the same cost): 80% on Reacher (90%) and 80% on Walker "
        "(90%)."
    )


def test_findings_name_noise_rank_and_conditioning(run):
    text = " ".join(findings(run))
    assert "63.0% is noise" in text
    assert "the rank accounts for at most 0.017" in text
    assert "With the same conditioned input for every method" in text
    assert "the lowest excess error" in text


def test_without_methods_of_the_paper_nothing_is_claimed(tmp_path):
    results = write_scores(tmp_path, {"zero": [0.2] * 5}, **FULL)
    assert headline(results) == {
        "What was run": "The paper's benchmark: 0 learned methods on Reacher, up to 5 seeds each.",
        "Who wins": "None of the paper's methods has finished.",
    }
    assert findings(results) == []
    assert "<h2>Verdict</h2>" in render(results, [], [])
