import csv
import math
import re
from dataclasses import replace
from pathlib import Path

import pytest
from support.synthetic_run import write_run

from cqm.experiments import published as paper
from cqm.experiments import tables
from cqm.experiments.intervals import Estimate, compare, estimate, factor
from cqm.experiments.measures import MEASURES, best, difference, ranking, score
from cqm.experiments.published import Published
from cqm.experiments.rendering import Cell, Table, latex, markdown, number, with_interval
from cqm.experiments.results import COLUMNS, load, write_csv

NAN = math.nan


# Means and intervals


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


# The paper's figures


def test_the_papers_figures_are_all_there():
    assert len(paper.ACCURACY) == len(paper.REGRET) == 24
    assert len(paper.EFFECT_NMSE) == 12
    assert len(paper.ABSOLUTE_NMSE) == 4
    assert len(paper.CORRELATION) == 3


@pytest.mark.parametrize(
    ("figures", "job", "value", "half", "text"),
    [
        (paper.ACCURACY, ("cartpole-swingup", "world"), 0.2521, 0.1389, "0.2521 ± 0.1389"),
        (paper.ACCURACY, ("walker-walk", "cocoa"), 0.2268, 0.0357, "0.2268 ± 0.0357"),
        (paper.REGRET, ("cartpole-swingup", "cqm"), 1e-7, 2e-7, "0.0000001 ± 0.0000002"),
        (paper.REGRET, ("cheetah-run", "task-td"), 0.0894, 0.0216, "0.0894 ± 0.0216"),
        (paper.EFFECT_NMSE, ("walker-walk", "world"), 1.646, None, "1.6460"),
        (paper.CORRELATION, ("reacher-easy", "sf"), 0.542, None, "0.542"),
    ],
)
def test_figures_stand_where_the_paper_has_them(figures, job, value, half, text):
    assert (figures[job].value, figures[job].half_width, figures[job].text) == (value, half, text)


def test_cqm_is_best_in_every_table_of_the_paper():
    for figures, sign in ((paper.ACCURACY, 1), (paper.REGRET, -1), (paper.EFFECT_NMSE, -1)):
        for domain in paper.DOMAINS:
            row = {m: sign * f.value for (d, m), f in figures.items() if d == domain}
            assert max(row, key=row.__getitem__) == "cqm"


# Numbers as text


@pytest.mark.parametrize(
    ("mean", "half", "text"),
    [
        (0.95531, 0.029, "0.9553 ± 0.0290"),
        (1e-7, 2e-7, "0.00000010 ± 0.00000020"),
        (0.0, 0.0, "0.0000"),
        (7.1e-6, NAN, "0.0000071"),
        (-0.25, 0.5, "−0.2500 ± 0.5000"),
        (NAN, NAN, "undefined"),
        (math.inf, NAN, "inf"),
        (3e-17, NAN, "3.0e-17"),
    ],
)
def test_numbers_have_as_many_decimals_as_they_need(mean, half, text):
    assert with_interval(mean, half) == text


def test_signs_can_be_shown():
    assert number(0.5, sign="+") == "+0.5000"
    assert number(-0.5, sign="+") == "−0.5000"


# Tables of a small run, by hand


def write_scores(directory, scores, column="accuracy", domain="reacher-easy"):
    """A run with one score for each (method, seed), and nothing else."""
    rows = []
    for (method, seed), value in scores.items():
        row = dict.fromkeys(COLUMNS["scores.csv"])
        rows.append({**row, "domain": domain, "seed": seed, "method": method, column: value})
    write_csv(directory / "scores.csv", rows, COLUMNS["scores.csv"])
    (directory / "run.json").write_text('{"preset": "test"}')
    return load(directory)


def by_seed(method, values):
    return {(method, 7 + i): value for i, value in enumerate(values)}


SCORES = {
    **by_seed("cqm", [0.94, 0.96, 0.98]),  # mean 0.96, error 0.011547
    **by_seed("world", [0.5, 0.6, 0.7]),  # mean 0.6, error 0.057735; the paper has 0.2598 ± 0.0592
    **by_seed("direct", [0.97, 0.99]),  # a seed is missing; mean 0.98, error 0.01
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


def test_records_hold_the_same_figures_unrounded(tmp_path):
    table = tables.paper_table(write_scores(tmp_path, SCORES), MEASURES["accuracy"])
    first = table.records[0]
    assert first["mean"] == pytest.approx(0.96, rel=1e-12)
    assert first["half_width_normal"] == pytest.approx(0.02263, rel=1e-3)
    assert first["half_width_student"] == pytest.approx(0.04968, rel=1e-3)
    assert (first["paper"], first["paper_half_width"]) == (0.9553, 0.029)
    assert first["against_paper_normal"] == first["against_paper_student"] == "agrees"
    assert [record["best_learned"] for record in table.records] == [0, 0, 1]


def test_for_regret_the_lowest_is_bold_and_higher_is_worse(tmp_path):
    scores = {**by_seed("cqm", [0.1, 0.1]), **by_seed("world", [0.2, 0.2])}
    table = tables.paper_table(write_scores(tmp_path, scores, "regret"), MEASURES["regret"])
    here = cells(table)[0]
    assert here[2] == ("0.1000", "worse", True)  # the paper has 0.0011 ± 0.0005
    assert here[3] == ("0.2000", "worse", False)


def test_methods_that_tie_exactly_are_both_bold(tmp_path):
    scores = {**by_seed("cqm", [0.5, 0.7]), **by_seed("sf", [0.7, 0.5]), **by_seed("world", [0.6])}
    results = write_scores(tmp_path, scores)
    assert best(results, "reacher-easy", "accuracy") == ["cqm", "world", "sf"]
    assert [cell[2] for cell in cells(tables.paper_table(results, MEASURES["accuracy"]))[0]] == [
        *(False, False, True, True, True)
    ]


def test_limits_are_never_the_best_learned_method(tmp_path):
    scores = {
        **by_seed("cqm", [0.5, 0.6]),
        **by_seed("oracle", [1, 1]),
        **by_seed("default", [1, 1]),
    }
    assert ranking(write_scores(tmp_path, scores), "reacher-easy", "accuracy") == ["cqm"]


def test_an_undefined_correlation_is_shown_as_undefined(tmp_path):
    scores = {
        **by_seed("cqm", [0.9, 0.8]),
        **by_seed("world", [None, None]),
        **by_seed("sf", [0.5, None]),
    }
    table = tables.paper_table(
        write_scores(tmp_path, scores, "correlation"), MEASURES["correlation"]
    )
    assert [cell[0] for cell in cells(table)[0][2:]] == ["0.8500 ± 0.0980", "undefined", "0.5000"]
    assert any("World on Reacher (2 of 2); SF on Reacher (1 of 2)" in note for note in table.notes)
    assert "undefined" in markdown(table)


def test_one_seed_has_no_intervals_and_says_so(tmp_path):
    table = tables.paper_table(write_scores(tmp_path, by_seed("cqm", [0.95])), MEASURES["accuracy"])
    here, theirs = cells(table)
    assert [row[1][0] for row in (here, theirs)] == ["here", "paper"]
    assert here[2] == ("0.9500", "agrees", True)
    assert "One seed (7): no intervals." in table.notes


def test_effect_errors_are_of_methods_that_predict_effects(tmp_path):
    results = write_scores(
        tmp_path, {**by_seed("cqm", [0.1, 0.2]), **by_seed("direct", [None, None])}, "effect_nmse"
    )
    assert score(results, "reacher-easy", "direct", "effect_nmse") is None
    assert score(results, "reacher-easy", "cqm", "effect_nmse").mean == pytest.approx(0.15)
    assert tables.paper_table(results, MEASURES["effect_nmse"]).header == ("Domain", "", "CQM-B")


def test_changes_are_over_the_seeds_that_both_have(tmp_path):
    scores = {**by_seed("cqm", [0.1, 0.2, 0.9]), **by_seed("cqm+effect", [0.3, 0.6])}
    results = write_scores(tmp_path, scores)
    change = difference(results, "reacher-easy", "accuracy", "cqm+effect", "cqm")
    assert (change.mean, change.num) == (pytest.approx(0.3), 2)
    table = tables.conditioning(results, MEASURES["accuracy"])
    assert [row[1][0] for row in cells(table)] == ["raw", "effect", "change by effect"]
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
    scores = {**by_seed("sf", [0.14, 0.24, 0.34]), **by_seed("world", [0.1, 0.21, 0.32])}
    table = tables.disagreements(write_scores(tmp_path, scores))
    (row,) = [[cell.text for cell in row] for row in table.rows]  # World: 0.21, paper 0.26 ± 0.06
    assert row[1:5] == ["Reacher", "SF", "0.2400 ± 0.1132", "0.3456 ± 0.0647"]
    assert row[5:] == ["agrees", "agrees"]


def test_figures_of_some_seeds_are_judged_by_those_seeds(tmp_path):
    scores = {
        **by_seed("world", [0.30, 0.9, 0.9]),  # paper 0.26 ± 0.06
        **by_seed("cqm", [0.95, 0.1, 0.1]),
        **by_seed("default", [0.9]),
    }
    results = write_scores(tmp_path, scores)
    table = tables.profile(results, "x", "", ("world", "cqm", "default"), ("accuracy",), "")
    world, cqm, default = table.records
    assert (world["seeds"], world["mean"], world["against_paper_normal"]) == (1, 0.30, "agrees")
    assert (cqm["best_learned"], world["best_learned"], default["best_learned"]) == (1, 0, 0)


def test_each_table_says_its_own_seeds_and_shares_only_how_it_is_read(tmp_path):
    scores = {**by_seed("cqm", [0.5, 0.6, 0.7]), **by_seed("default", [0.9, 0.9])}
    made = {table.name: table for table in tables.make_tables(write_scores(tmp_path, scores))}
    assert made["default"].notes == ("Seeds that all rows of a domain have: 7, 8.",)
    assert "Bold" in made["accuracy"].legend
    assert made["accuracy"].legend in markdown(made["accuracy"])
    assert made["accuracy"].notes == ("Means over 3 seeds (7, 8, 9).",)


# Files


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return write_run(tmp_path_factory.mktemp("run"))


NAMES = [
    *("absolute-nmse", "accuracy", "conditioning-accuracy", "conditioning-effect-nmse"),
    *("conditioning-regret", "correlation", "default", "disagreements", "effect-nmse"),
    *("ensemble", "expected", "regret", "ordinary", "choosing"),
]


def test_the_same_results_give_the_same_bytes(run, tmp_path):
    def contents(directory):
        return {path.name: path.read_bytes() for path in tables.write_tables(directory)}

    first = contents(run)
    assert sorted(first) == sorted(f"{n}.{s}" for n in NAMES for s in ("md", "csv", "tex"))
    assert contents(run) == first
    assert contents(write_run(tmp_path)) == first


def test_what_is_beyond_the_paper_has_tables_of_its_own(run):
    made = {table.name: table for table in tables.make_tables(load(run))}
    beyond = ("default", "ensemble", "conditioning-accuracy")
    for name, table in made.items():
        if name in ("ordinary", "choosing"):
            continue  # of the study of logs, which has estimators
        methods = {record["method"] for record in table.records}
        others = methods - set(paper.METHODS) - {"oracle", "zero", "random"}
        assert bool(others) == (name in beyond or name.startswith("conditioning"))
        assert bool(others) == table.title.startswith("Beyond the paper")


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
    names = {path.stem for path in tables.write_tables(tmp_path)}
    assert {"accuracy", "regret", "effect-nmse", "expected"} <= names
    assert not {"default", "ensemble", "conditioning-accuracy", "absolute-nmse"} & names


def test_markdown_tables_are_whole(run):
    for table in tables.make_tables(load(run)):
        lines = [line for line in markdown(table).splitlines() if line.startswith("|")]
        assert len(lines) == 2 + len(list(table.rows))
        assert {line.count("|") for line in lines} == {len(table.header) + 1}


def test_csv_tables_read_back(run):
    tables.write_tables(run)
    with open(run / "tables" / "accuracy.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    results = load(run)
    assert len(rows) == 4 * (6 + 3)
    for row in rows:
        mean = score(results, row["domain"], row["method"], "accuracy").mean
        assert float(row["mean"]) == mean


def test_latex_is_balanced_and_escaped():
    strange = Table(
        *("x", "100% & more", "a_b", ("Domain", "x#1"), (((Cell("{~^\\}"), Cell("0.5 ± 0.1")),),)),
        *(("≈ −1",), (), 1),
    )
    text = latex(strange)
    assert r"100\% \& more" in text
    assert r"a\_b $\approx$ $-$1" in text
    assert r"x\#1" in text
    assert r"\{\textasciitilde{}\textasciicircum{}\textbackslash{}\}" in text
    assert r"0.5 $\pm$ 0.1 \\" in text
    unescaped = re.sub(r"\\[{}]", "", text)
    assert unescaped.count("{") == unescaped.count("}")
    assert text.isascii()


def test_every_latex_table_is_ascii_with_even_rows(run):
    for table in tables.make_tables(load(run)):
        text = latex(table)
        assert text.isascii()
        rows = [line for line in text.splitlines() if line.endswith(r"\\")]
        assert {len(re.findall(r"(?<!\\)&", row)) for row in rows} == {len(table.header) - 1}


def test_markdown_escapes_what_would_break_a_table():
    table = Table("x", "a|b", "c", ("D",), (((Cell("<i>_*`|\n", bold=True),),),), (), (), 1)
    assert r"| **\<i\>\_\*\`\|** |" in markdown(table)
    assert r"### a\|b" in markdown(table)


def test_the_summary_fits_a_terminal(run):
    text = tables.summary(run)
    lines = text.splitlines()
    assert len(lines) == 1 + 2 * 4 + 1 + 1 + 2 + 4 * 3 * 4
    assert max(map(len, lines)) <= 90
    assert lines[0].split() == [
        *("accuracy", "Ceiling", "Random", "CQM-B", "World", "SF"),
        *("Direct", "value", "Task-TD", "COCOA"),
    ]
    assert lines[2].split() == ["paper", "1.000", "0.252", "0.424", "0.990", "0.841", "0.644"]


def test_the_summary_without_methods_of_the_paper_says_so(tmp_path):
    write_run(tmp_path, seeds=(7,), methods=("zero",), beyond=())
    assert "none of the paper's methods" in tables.summary(tmp_path)


def test_a_directory_without_a_run_is_explained(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"run\.json is missing; give the directory"):
        tables.write_tables(tmp_path)
    assert list(Path(tmp_path).iterdir()) == []
