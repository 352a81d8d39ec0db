"""Ordinary versus branched, as it is run and shown."""

import csv
import shutil
from dataclasses import replace

import pytest
from support.synthetic_run import log_rows, write_run

from cqm.cli import main
from cqm.experiments.results import COLUMNS, Results, load, write_csv
from cqm.experiments.studies.logs_views import ordinary_figures, ordinary_tables, ordinary_verdict
from cqm.storage import read_json


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    return load(write_run(tmp_path_factory.mktemp("run")))


def test_a_row_for_every_estimator_and_the_best_without_branches_in_bold():
    errors, _ = ordinary_tables(Results({}, [], logs=log_rows("reacher-easy")))
    assert errors.header[3:5] == ("Excess error, 1,000", "Excess error, 20,000")
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
    errors, _ = ordinary_tables(Results({}, [], logs=rows))
    assert errors.groups[0][1][3].text == "0.0700 ± 0.0980"  # 1.96 · 0.1/√2 /√2
    assert errors.notes[-1] == "Means over seeds 7, 8."


def test_scores_from_logs_order_estimators_or_reverse_them():
    _, choices = ordinary_tables(Results({}, [], logs=log_rows("reacher-easy")))
    for row in choices.rows:
        by_r, by_dr, chosen_by_r, chosen_by_dr, best = (cell.value for cell in row[2:])
        assert (by_r, by_dr) == (1.0, -1.0)
        assert chosen_by_r == best == pytest.approx((0.02 + 0.001) / 2)
        assert chosen_by_dr == pytest.approx((2.0 + 0.1) / 2)


def test_a_figure_for_every_domain(results):
    pictures = ordinary_figures(results)
    assert [picture.title for picture in pictures] == ["Cartpole", "Reacher", "Cheetah", "Walker"]
    assert pictures[0].caption == (
        "From 20,000 rollouts, nuisance 64, by state: branched 0.00010, residual 0.0010, "
        "residual, unweighted 0.010, hindsight 0.10."
    )
    assert all(picture.svg.count("rollouts") == 3 for picture in pictures)


def test_the_verdict_names_the_best_from_logs(results):
    text = ordinary_verdict(results)
    assert "0.0010 on Walker by residual (0.00010)" in text
    assert ordinary_verdict(replace(results, logs=[])) == ""


def test_one_page_for_both_studies_or_for_logs_alone(results, tmp_path, capsys):
    both = write_run(tmp_path / "both")
    assert main(["report", str(both)]) == 0
    page = (both / "report.html").read_text()
    assert 'id="table-ordinary"' in page
    assert 'id="table-accuracy"' in page
    alone = tmp_path / "alone"
    alone.mkdir()
    shutil.copy(both / "logs.csv", alone)
    capsys.readouterr()
    assert main(["report", str(alone)]) == 0
    page = (alone / "report.html").read_text()
    assert 'id="table-ordinary"' in page
    assert 'id="table-accuracy"' not in page
    assert "seeds" not in page.partition("From logs")[0]
    assert "excess error by the number" in capsys.readouterr().out


def test_the_study_is_continued_and_refuses_other_settings(tmp_path, capsys):
    run = ["reproduce", "--study", "logs", "--domains", "cartpole-swingup", "--out", str(tmp_path)]
    assert main([*run, "--preset", "smoke"]) == 0
    table = (tmp_path / "logs.csv").read_bytes()
    rows = list(csv.DictReader(table.decode().splitlines()))
    assert {row["estimator"] for row in rows} == {
        *("branched", "residual", "residual-unweighted", "hindsight")
    }
    assert read_json(tmp_path / "logs.json")["study"]["trajectories"] == [400]
    (tmp_path / "logs.csv").unlink()
    record = tmp_path / "logs" / "cartpole-swingup-0-uniform-7.json"
    written = record.stat().st_mtime_ns
    assert main([*run, "--preset", "smoke"]) == 0
    assert record.stat().st_mtime_ns == written
    assert (tmp_path / "logs.csv").read_bytes() == table
    capsys.readouterr()
    assert main([*run, "--preset", "quick"]) == 2
    assert "holds a run with other study" in capsys.readouterr().err
    assert main([*run, "--preset", "smoke", "--methods", "cqm"]) == 2
    assert "leave out --methods" in capsys.readouterr().err


def test_rows_round_trip(tmp_path):
    rows = log_rows("walker-walk")
    write_csv(tmp_path / "logs.csv", rows, COLUMNS["logs.csv"])
    assert load(tmp_path).logs == rows
