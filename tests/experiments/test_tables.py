import csv
import re

import pytest
from support.synthetic_run import write_run, write_scores

from cqm.experiments import published as paper, tables
from cqm.experiments.methods import METHODS, Method
from cqm.experiments.rendering import latex, markdown, write_tables
from cqm.experiments.results import load
from cqm.experiments.scores import MEASURES, score

SCORES = {
    "cqm": [0.94, 0.96, 0.98],  # mean 0.96, error 0.011547
    "world": [0.5, 0.6, 0.7],  # mean 0.6, error 0.057735; the paper has 0.2598 ± 0.0592
    "direct": [0.97, 0.99],  # a seed is missing; mean 0.98, error 0.01
}


def cells(table):
    """Rows of a table as text, with their marks."""
    return [[(cell.text, cell.mark, cell.bold) for cell in row] for row in table.rows]


def test_a_table_by_hand(tmp_path):
    table = tables.paper_table(write_scores(tmp_path, SCORES), MEASURES["accuracy"])
    assert table.header == ("Domain", "", "CQM-B", "World", "Direct value")
    here, student, theirs = cells(table)
    assert here[2:] == [
        ("0.9600 ± 0.0226", "agrees", False),
        ("0.6000 ± 0.1132", "better", False),
        ("0.9800 ± 0.0196", "better", True),
    ]
    # 4.3027 standard errors for three seeds, 12.7062 for two.
    assert student[2:] == [
        ("± 0.0497", "agrees", False),
        ("± 0.2484", "better", False),  # 0.3402 apart; 0.2484 + 0.0839 do not suffice
        ("± 0.1271", "agrees", False),
    ]
    assert [text for text, _, _ in theirs[2:]] == [
        "0.9553 ± 0.0290",
        "0.2598 ± 0.0592",
        "0.8534 ± 0.0974",
    ]
    assert "2 of 3 seeds: Direct value." in table.notes
    assert "Means over 3 seeds (7, 8, 9)." in table.notes


def test_records_hold_the_same_numbers_unrounded(tmp_path):
    table = tables.paper_table(write_scores(tmp_path, SCORES), MEASURES["accuracy"])
    first = table.records[0]
    assert first["mean"] == pytest.approx(0.96, rel=1e-12)
    assert first["half_width_normal"] == pytest.approx(0.02263, rel=1e-3)
    assert first["half_width_student"] == pytest.approx(0.04968, rel=1e-3)
    assert (first["paper"], first["paper_half_width"]) == (0.9553, 0.029)
    assert first["against_paper_normal"] == first["against_paper_student"] == "agrees"
    assert [record["best_learned"] for record in table.records] == [0, 0, 1]


def test_for_regret_the_lowest_is_bold_and_higher_is_worse(tmp_path):
    scores = {"cqm": [0.1, 0.1], "world": [0.2, 0.2]}
    table = tables.paper_table(write_scores(tmp_path, scores, "regret"), MEASURES["regret"])
    here = cells(table)[0]
    assert here[2] == ("0.1000", "worse", True)  # the paper has 0.0011 ± 0.0005
    assert here[3] == ("0.2000", "worse", False)


def test_methods_that_tie_exactly_are_both_bold(tmp_path):
    scores = {"cqm": [0.5, 0.7], "sf": [0.7, 0.5], "world": [0.6]}
    results = write_scores(tmp_path, scores)
    assert [cell[2] for cell in cells(tables.paper_table(results, MEASURES["accuracy"]))[0]] == [
        *(False, False, True, True, True)
    ]


def test_an_undefined_correlation_is_shown_as_undefined(tmp_path):
    scores = {
        "cqm": [0.9, 0.8],
        "world": [None, None],
        "sf": [0.5, None],
    }
    table = tables.paper_table(
        write_scores(tmp_path, scores, "correlation"), MEASURES["correlation"]
    )
    assert [cell[0] for cell in cells(table)[0][2:]] == ["0.8500 ± 0.0980", "undefined", "0.5000"]
    assert any("World on Reacher (2 of 2); SF on Reacher (1 of 2)" in note for note in table.notes)
    assert "undefined" in markdown(table)


def test_one_seed_has_no_intervals_and_says_so(tmp_path):
    table = tables.paper_table(write_scores(tmp_path, {"cqm": [0.95]}), MEASURES["accuracy"])
    here, theirs = cells(table)
    assert [row[1][0] for row in (here, theirs)] == ["here", "paper"]
    assert here[2] == ("0.9500", "agrees", True)
    assert "One seed (7), so no intervals." in table.notes


def test_effect_errors_are_of_methods_that_predict_effects(tmp_path):
    results = write_scores(tmp_path, {"cqm": [0.1, 0.2], "direct": [None, None]}, "effect_nmse")
    assert tables.paper_table(results, MEASURES["effect_nmse"]).header == ("Domain", "", "CQM-B")


def test_changes_are_over_the_seeds_that_both_have(tmp_path):
    scores = {"cqm": [0.1, 0.2, 0.9], "cqm+effect": [0.3, 0.6]}
    results = write_scores(tmp_path, scores)
    table = tables.conditioning(results, MEASURES["accuracy"])
    assert [row[1][0] for row in cells(table)] == ["raw", "effect", "effect − raw"]
    assert cells(table)[2][2][0] == "+0.3000 ± 0.1960"
    assert "2 of 3 seeds: CQM-B + effect." in table.notes


def test_disagreements_are_listed_with_both_intervals(tmp_path):
    table = tables.disagreements(write_scores(tmp_path, SCORES))
    world, direct = [[cell.text for cell in row] for row in table.rows]
    assert world[:3] == ["Accuracy", "Reacher", "World"]
    assert world[3:] == ["0.6000 ± 0.1132", "0.2598 ± 0.0592", "better", "better"]
    assert direct[:3] == ["Accuracy", "Reacher", "Direct value"]
    assert direct[3:] == ["0.9800 ± 0.0196", "0.8534 ± 0.0974", "better", "agrees"]


def test_what_falls_below_the_papers_interval_is_listed_though_intervals_meet(tmp_path):
    scores = {"sf": [0.14, 0.24, 0.34], "world": [0.1, 0.21, 0.32]}
    table = tables.disagreements(write_scores(tmp_path, scores))
    (row,) = [[cell.text for cell in row] for row in table.rows]  # World: 0.21, paper 0.26 ± 0.06
    assert row[1:5] == ["Reacher", "SF", "0.2400 ± 0.1132", "0.3456 ± 0.0647"]
    assert row[5:] == ["agrees", "agrees"]


def test_scores_of_some_seeds_are_judged_by_those_seeds(tmp_path):
    scores = {
        "world": [0.30, 0.9, 0.9],  # paper 0.26 ± 0.06
        "cqm": [0.95, 0.1, 0.1],
        "default": [0.9],
    }
    results = write_scores(tmp_path, scores)
    table = tables.profile(results, "x", "", ("world", "cqm", "default"), ("accuracy",), "")
    world, cqm, default = table.records
    assert (world["seeds"], world["mean"], world["against_paper_normal"]) == (1, 0.30, "agrees")
    assert (cqm["best_learned"], world["best_learned"], default["best_learned"]) == (1, 0, 0)


def test_each_table_says_its_own_seeds_and_shares_only_how_it_is_read(tmp_path):
    scores = {"cqm": [0.5, 0.6, 0.7], "default": [0.9, 0.9]}
    made = {table.name: table for table in tables.make_tables(write_scores(tmp_path, scores))}
    assert made["default"].notes == ("Seeds shared by all rows of a domain: 7, 8.",)
    assert "Bold" in made["accuracy"].legend
    assert made["accuracy"].legend in markdown(made["accuracy"])
    assert made["accuracy"].notes == ("Means over 3 seeds (7, 8, 9).",)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return write_run(tmp_path_factory.mktemp("run"))


NAMES = [
    *("absolute-nmse", "accuracy", "conditioning-accuracy", "conditioning-effect-nmse"),
    *("conditioning-regret", "correlation", "default", "disagreements", "effect-nmse"),
    *("ensemble", "expected", "regret", "ordinary", "choosing", "all-methods"),
]


def test_the_same_results_give_the_same_bytes(run, tmp_path):
    def contents(directory):
        write_tables(tables.make_tables(load(directory)), directory)
        return {path.name: path.read_bytes() for path in (directory / "tables").iterdir()}

    first = contents(run)
    assert sorted(first) == sorted(f"{n}.{s}" for n in NAMES for s in ("md", "csv", "tex"))
    assert contents(run) == first
    assert contents(write_run(tmp_path)) == first


def test_what_is_beyond_the_paper_has_tables_of_its_own(run):
    made = {table.name: table for table in tables.make_tables(load(run))}
    sections = {name: table.section for name, table in made.items()}
    assert {name for name, section in sections.items() if section == "logs"} == {
        *("ordinary", "choosing")
    }
    assert {name for name, section in sections.items() if section == "beyond"} == {
        *("default", "ensemble", "all-methods", "conditioning-accuracy", "conditioning-regret"),
        "conditioning-effect-nmse",
    }
    for table in made.values():
        if table.section != "logs":  # whose records are of estimators
            methods = {record["method"] for record in table.records}
            others = methods - set(paper.METHODS) - {"oracle", "zero", "random"}
            assert bool(others) == (table.section == "beyond")


@pytest.mark.parametrize("others", [("cqm", "sf"), ()])
def test_a_registered_method_has_a_table_without_further_ado(tmp_path, monkeypatch, others):
    method = Method("new", "New method", "nowhere:New", "outcomes")
    monkeypatch.setitem(METHODS, "new", method)
    write_run(tmp_path, domains=("reacher-easy",), methods=others, beyond=("new",))
    (table,) = [t for t in tables.make_tables(load(tmp_path)) if t.name == "new"]
    assert (table.title, table.section) == ("New method", "beyond")
    titles = ["CQM-B", "New method"] if others else ["New method"]
    assert [row[1].text for row in table.rows] == titles
    assert table.header[2:] == (
        *("Accuracy", "Normalised regret", "Effect NMSE", "Excess error", "Share of ceiling"),
    )
    assert ("next to the paper's effect model" in table.caption) == bool(others)


def test_ceilings_and_floors_stand_in_the_tables(run):
    made = {table.name: table for table in tables.make_tables(load(run))}
    assert made["accuracy"].header[2:4] == ("Ceiling", "Random")
    assert made["regret"].header[2:4] == ("Floor", "Random")
    assert made["effect-nmse"].header[2:4] == ("Noise floor", "Zero effect")
    walker = list(made["effect-nmse"].rows)[-3]
    assert [cell.text for cell in walker[2:4]] == ["0.6300 ± 0.0110", "1.0000"]
    assert made["accuracy"].records[-1]["limit"] == pytest.approx(0.48, abs=0.01)


def test_a_run_of_little_gives_the_tables_it_can(tmp_path):
    write_run(tmp_path, domains=("walker-walk",), seeds=(7,), methods=("cqm", "zero"), beyond=())
    for path in tmp_path.glob("*.csv"):
        if path.name != "scores.csv":
            path.unlink()
    names = {table.name for table in tables.make_tables(load(tmp_path))}
    assert {"accuracy", "regret", "effect-nmse", "expected"} <= names
    assert not {"default", "ensemble", "conditioning-accuracy", "absolute-nmse"} & names


def test_markdown_tables_are_whole(run):
    for table in tables.make_tables(load(run)):
        lines = [line for line in markdown(table).splitlines() if line.startswith("|")]
        assert len(lines) == 2 + len(list(table.rows))
        assert {line.count("|") for line in lines} == {len(table.header) + 1}


def test_csv_tables_read_back(run):
    results = load(run)
    write_tables(tables.make_tables(results), run)
    with open(run / "tables" / "accuracy.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 4 * (6 + 3)
    for row in rows:
        mean = score(results, row["domain"], row["method"], "accuracy").mean
        assert float(row["mean"]) == mean


def test_every_latex_table_is_ascii_with_even_rows(run):
    for table in tables.make_tables(load(run)):
        text = latex(table)
        assert text.isascii()
        rows = [line for line in text.splitlines() if line.endswith(r"\\")]
        assert {len(re.findall(r"(?<!\\)&", row)) for row in rows} == {len(table.header) - 1}
