import pytest
from support.synthetic_run import world_rows, write_run

from cqm.experiments import report
from cqm.experiments.results import COLUMNS, Results, load, write_csv
from cqm.experiments.studies import worlds_views

ERRORS = {"constant": 1.0, "ridge": 0.2, "direct": 0.4, "unrolled": 0.1, "paper": 0.5}


@pytest.fixture
def rows():
    rows = world_rows("clock", 2_000)
    rows += world_rows("clock", 20_000, ERRORS, "unrolled")
    return rows + world_rows("random-100", 5_000, ERRORS, "ridge")


def test_a_line_per_world_and_size(rows):
    table, _ = worlds_views.tables(Results({}, [], worlds=rows))
    assert table.header == (
        *("World", "States", "Noise floor", "Constant", "Ridge", "Direct", "Unrolled"),
        *("Paper's", "Default", "Chosen", "Above the best", "Seconds"),
    )
    assert [len(group) for group in table.groups] == [2, 1]
    lines = [[cell.text for cell in row] for row in table.rows]
    assert lines[0] == [
        *("clock", "2,000", "0.2500", "1.0000", "0.2000", "0.4000", "—", "0.5000", "0.2000"),
        *("ridge", "0.0000", "12"),
    ]
    assert lines[1][:2] == ["", "20,000"]
    assert lines[2][-3:] == ["ridge", "0.1000 ± 0.0100", "12"]
    bold = [[cell.text for cell in row if cell.bold] for row in table.rows]
    assert bold == [["0.2000"], ["0.1000"], ["0.1000", "0.1000 ± 0.0100"]]


def test_pooled_errors_stand_beside_those_in_own_units(rows):
    for row in rows:
        row["pooled_error"], row["pooled_error_se"] = 2 * row["own_error"], 0.02
        row["own_error_se"] = 0.01
    _, table = worlds_views.tables(Results({}, [], worlds=rows))
    assert table.header[2:] == (
        *("Best single model", "Default, own units", "Best, own units"),
        *("Default, pooled", "Best, pooled"),
    )
    lines = [[cell.text for cell in row] for row in table.rows]
    assert lines[2] == [
        *("random-100", "5,000", "Unrolled", "0.2000 ± 0.0100", "0.1000 ± 0.0100"),
        *("0.4000 ± 0.0200", "0.2000 ± 0.0200"),
    ]


def test_the_verdict_counts_cases(rows):
    assert worlds_views.verdict(Results({}, [], worlds=rows)) == (
        "2 worlds in 3 cases, one per world and number of training states. The default model is as "
        "good as the best single model, up to the allowance, in 2 of them, and chose exactly that "
        "model in 2."
    )
    assert worlds_views.verdict(Results({}, [])) == ""


def test_worlds_alone_give_a_report(rows, tmp_path):
    write_csv(tmp_path / "worlds.csv", rows, COLUMNS["worlds.csv"])
    lines = report.write(tmp_path).splitlines()
    assert lines[0] == "excess error of the default model"
    assert lines[2].split() == ["clock", "2,000", "0.2000", "ridge", "0.0000"]
    assert max(map(len, lines[:5])) <= 90
    page = (tmp_path / "report.html").read_text()
    assert "the default model on many worlds" in page
    assert 'id="table-worlds"' in page
    assert "<b>Many worlds.</b> 2 worlds in 3 cases" in page
    table = (tmp_path / "tables" / "worlds.md").read_text()
    assert table.startswith("### The default model on many worlds\n")
    assert table.count("| clock |") == 1


def test_worlds_stand_beside_the_benchmark(rows, tmp_path):
    write_run(tmp_path, domains=("reacher-easy",))
    write_csv(tmp_path / "worlds.csv", rows, COLUMNS["worlds.csv"])
    assert len(load(tmp_path).worlds) == len(rows)
    text = report.write(tmp_path)
    assert text.startswith("accuracy")
    assert "excess error of the default model" in text
