from dataclasses import replace

import pytest
from support.synthetic_run import log_rows, write_run

from cqm.experiments.results import Results, load
from cqm.experiments.studies import logs_views


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    return load(write_run(tmp_path_factory.mktemp("run")))


def test_a_row_for_every_estimator_and_the_best_without_branches_in_bold():
    errors, _ = logs_views.tables(Results({}, [], logs=log_rows("reacher-easy")))
    assert errors.header[3:5] == ("Excess error, 1,000", "Excess error, 20,000")
    assert errors.header[-1] == "Regret share"
    assert [len(group) for group in errors.groups] == [4, 4, 4]
    residual = errors.groups[1][1]
    assert [cell.text for cell in residual[2:]] == [
        *("Residual", "0.0200", "0.0010", "0.1009", "0.1000", "0.8000", "0.0200")
    ]
    bold = [cell.text for row in errors.rows for cell in row if cell.bold]
    assert bold == ["0.0010"] * 3


def test_several_seeds_have_an_interval():
    rows = [*log_rows("reacher-easy"), *log_rows("reacher-easy", seed=8)]
    rows = [{**row, "excess_error": row["excess_error"] + 0.1 * (row["seed"] - 7)} for row in rows]
    errors, _ = logs_views.tables(Results({}, [], logs=rows))
    assert errors.groups[0][1][3].text == "0.0700 ± 0.0980"  # 1.96 · 0.1/√2 /√2
    assert errors.notes[-1] == "Means over seeds 7, 8."


def test_scores_from_logs_order_estimators_or_reverse_them():
    _, choices = logs_views.tables(Results({}, [], logs=log_rows("reacher-easy")))
    for row in choices.rows:
        by_r, by_dr, chosen_by_r, chosen_by_dr, best = (cell.value for cell in row[2:])
        assert (by_r, by_dr) == (1.0, -1.0)
        assert chosen_by_r == best == pytest.approx((0.02 + 0.001) / 2)
        assert chosen_by_dr == pytest.approx((2.0 + 0.1) / 2)


def test_a_figure_for_every_domain(results):
    pictures = logs_views.figures(results)
    assert [picture.title for picture in pictures] == ["Cartpole", "Reacher", "Cheetah", "Walker"]
    assert pictures[0].caption == (
        "With 20,000 rollouts (nuisance 64, by state): branched 0.00010; residual 0.0010; "
        "residual, unweighted 0.010; hindsight 0.10."
    )
    assert all(picture.svg.count("rollouts") == 3 for picture in pictures)


def test_the_verdict_names_the_best_from_logs(results):
    text = logs_views.verdict(results)
    assert "0.0010 on Walker with residual (0.00010)" in text
    assert logs_views.verdict(replace(results, logs=[])) == ""


def test_replay_sets_have_a_table_and_figures_of_their_own():
    names = {"residual": "residual", "residual-unweighted": "steps", "hindsight": "hindsight"}
    rows = [
        {**row, "behaviour": "mixed", "estimator": names[row["estimator"]]}
        for row in log_rows("reacher-easy")
        if row["behaviour"] == "uniform" and row["estimator"] in names
    ]
    results = Results({}, [], logs=rows)
    errors, _ = logs_views.tables(results)
    assert (errors.name, errors.title) == ("replay", "Effects from replay sets")
    assert errors.groups[1][0][1].text == "nuisance 64, mixed policies"
    (picture,) = logs_views.figures(results)
    assert picture.caption.startswith("With 20,000 decisions (nuisance 64, mixed policies): resid")
    assert picture.svg.count("decisions") == 2
    assert "decisions of a replay set with the nuisance" in logs_views.verdict(results)
