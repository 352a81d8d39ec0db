"""The committed results are what the committed code makes of the committed scores."""

import json
import re
import shutil
from pathlib import Path

import pytest

from cqm.experiments import report, results
from cqm.experiments.protocol import preset
from cqm.experiments.studies.benchmark import Benchmark
from cqm.storage import encode_json, read_json

RESULTS = Path(__file__).parent.parent / "results" / "paper"


@pytest.fixture(scope="module")
def again(tmp_path_factory):
    directory = tmp_path_factory.mktemp("results")
    for path in (*RESULTS.glob("*.json"), *RESULTS.glob("*.csv")):
        shutil.copy(path, directory)
    report.write(directory)
    return directory


@pytest.mark.parametrize("kind", ["tables", "figures"])
def test_every_table_and_figure_is_committed(again, kind):
    assert {path.name for path in (again / kind).iterdir()} == {
        path.name for path in (RESULTS / kind).iterdir()
    }


def test_tables_follow_from_the_scores(again):
    for path in (again / "tables").iterdir():
        assert (RESULTS / "tables" / path.name).read_bytes() == path.read_bytes(), path.name


def test_the_page_follows_from_the_scores(again):
    def words(directory):
        page = (directory / "report.html").read_text()
        return re.sub(r"<svg.*?</svg>", "", page, flags=re.S)  # whose bytes depend on versions

    assert words(RESULTS) == words(again)


def test_scores_have_the_current_columns():
    for name, columns in results.COLUMNS.items():
        header = (RESULTS / name).read_text().partition("\n")[0]
        assert header.split(",") == list(columns), name


def test_the_run_was_the_papers_protocol():
    benchmark = Benchmark(preset("paper"))
    stored = benchmark.upgraded({"protocol": read_json(RESULTS / "run.json")["protocol"]})
    assert json.loads(encode_json(stored)) == json.loads(encode_json(benchmark.settings()))


def test_every_method_of_the_paper_ran_on_every_domain():
    loaded = results.load(RESULTS)
    protocol = preset("paper")
    for domain in protocol.domains:
        for method in protocol.stages[0].methods:
            if method != "ceilings":
                seeds = loaded.values(domain, method, "accuracy")
                assert tuple(seeds) == protocol.stages[0].seeds, (domain, method)
