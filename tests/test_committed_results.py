"""The committed results are what the committed code makes of the committed scores."""

import json
import re
import shutil
from pathlib import Path

import pytest

from cqm.experiments import report, results
from cqm.experiments.ablations import ABLATIONS
from cqm.experiments.protocol import preset
from cqm.experiments.studies.benchmark import Benchmark
from cqm.storage import encode_json, read_json

RESULTS = Path(__file__).parent.parent / "results" / "paper"
RUNS = sorted(path.parent for path in RESULTS.parent.glob("*/checksums.json"))


@pytest.fixture(scope="module", params=RUNS, ids=lambda path: path.name)
def run(request):
    return request.param


@pytest.fixture(scope="module")
def again(run, tmp_path_factory):
    directory = tmp_path_factory.mktemp("results")
    for path in (*run.glob("*.json"), *run.glob("*.csv"), *run.glob("ablations/*.*")):
        copy = directory / path.relative_to(run)
        copy.parent.mkdir(exist_ok=True)
        shutil.copy(path, copy)
    report.write(directory)
    return directory


@pytest.mark.parametrize("kind", ["tables", "figures"])
def test_every_table_and_figure_is_committed(run, again, kind):
    assert {path.name for path in (again / kind).glob("*")} == {
        path.name for path in (run / kind).glob("*")
    }


def test_tables_follow_from_the_scores(run, again):
    for path in (again / "tables").glob("*"):  # a run may have none
        assert (run / "tables" / path.name).read_bytes() == path.read_bytes(), path.name


def test_the_page_follows_from_the_scores(run, again):
    def words(directory):
        page = (directory / "report.html").read_text()
        return re.sub(r"<svg.*?</svg>", "", page, flags=re.S)  # whose bytes depend on versions

    assert words(run) == words(again)


def test_scores_have_the_current_columns(run):
    found = {path.name: path.read_text().partition("\n")[0] for path in run.glob("*.csv")}
    varied = list(run.glob("ablations/*.csv"))
    assert found or varied
    for name, header in found.items():
        assert header.split(",") == list(results.COLUMNS[name]), name
    for path in varied:
        columns = ABLATIONS[path.stem].columns
        assert path.read_text().partition("\n")[0].split(",") == list(columns), path


def test_the_paper_run_has_every_file_of_its_studies():
    assert {path.name for path in RESULTS.glob("*.csv")} == {*results.COLUMNS} - {
        "worlds.csv",
        "parameters.csv",  # not recorded when it ran
    }


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
