import math

import pytest
from support.synthetic_run import write_run, write_scores

from cqm.experiments.all_methods import all_methods_table, ranks
from cqm.experiments.intervals import estimate
from cqm.experiments.results import COLUMNS, load, write_csv
from cqm.storage import write_sealed

SCORES = {"cqm": [0.9, 0.9], "ridge": [0.8, 0.6], "world": [0.7, 0.7], "random": [0.3, 0.3]}


def test_ranks_by_hand():
    means = {"a": estimate([0.5]), "b": estimate([0.9]), "c": estimate([0.5]), "d": estimate([0.1])}
    assert ranks(means) == {"a": 2, "b": 1, "c": 2, "d": 4}
    assert ranks({"a": estimate([math.nan]), "b": estimate([0.1])}) == {"b": 1}


def test_a_table_by_hand(tmp_path):
    write_scores(tmp_path, SCORES)
    columns = COLUMNS["parameters.csv"]
    rows = [
        {"domain": "reacher-easy", "seed": seed, "method": "ridge", "parameters": num}
        for seed, num in ((7, 900), (8, 1_100))
    ]
    write_csv(tmp_path / "parameters.csv", rows, columns)
    job = {"domain": "reacher-easy", "seed": 7, "method": "ridge", "compilation": 0.5}
    earlier = {**job, "seed": 8, "training": 8.0, "evaluation": 2.5, "compilation": 1.0}
    content = {"schema": 2, "jobs": [{**job, "training": 5.0, "evaluation": 1.5}]}
    write_sealed(tmp_path / "times.json", {**content, "earlier": [earlier]})
    table = all_methods_table(load(tmp_path))
    assert table.header == ("Method", "From", "Reacher", "Mean rank", "Seconds", "Parameters")
    found = [[cell.text for cell in row] for row in table.rows]
    assert found == [
        ["CQM-B", "paper", "0.9000 (1)", "1.0", "—", "—"],
        ["Ridge", "beyond", "0.7000 ± 0.1960 (2)", "2.0", "9", "1,000"],
        ["World", "paper", "0.7000 (2)", "2.0", "—", "—"],
    ]
    assert [row[2].bold for row in table.rows] == [True, False, False]
    record = next(row for row in table.records if row["method"] == "ridge")
    assert (record["rank"], record["seconds"], record["parameters"]) == (2, 9.25, 1_000)


def test_a_run_of_the_papers_methods_alone_has_no_such_table(tmp_path):
    results = write_scores(tmp_path, {"cqm": [0.9], "random": [0.3], "cqm+effect": [0.9]})
    assert all_methods_table(results).groups == ()


def test_methods_that_lack_a_domain_have_no_mean_rank(tmp_path):
    directory = write_run(tmp_path, domains=("reacher-easy",), methods=("cqm",), beyond=("ridge",))
    more = write_run(tmp_path / "more", domains=("walker-walk",), methods=("cqm",), beyond=())
    path, rest = directory / "scores.csv", (more / "scores.csv").read_text().partition("\n")[2]
    path.write_text(path.read_text() + rest)
    table = all_methods_table(load(directory))
    rows = {row[0].text: [cell.text for cell in row] for row in table.rows}
    assert rows["Ridge"][3:5] == ["—", "—"]
    assert rows["CQM-B"][4] != "—"
    assert "Not on all domains: Ridge." in table.notes


@pytest.mark.parametrize("seeds", [(7,), (7, 8, 9, 10)])
def test_fewer_seeds_are_named(tmp_path, seeds):
    write_run(tmp_path, domains=("reacher-easy",), seeds=seeds, methods=("cqm",), beyond=("dae",))
    notes = all_methods_table(load(tmp_path)).notes
    if len(seeds) == 1:
        assert notes == ("One seed, so no intervals.",)
    else:
        assert notes == ("Means over 4 seeds.", "3 of 4 seeds: Direct advantage.")
