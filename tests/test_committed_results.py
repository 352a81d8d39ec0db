"""The committed results are what the committed code makes of the committed scores."""

import json
import shutil
from pathlib import Path

import pytest

from cqm.experiments import results as records
from cqm.experiments import tables
from cqm.experiments.protocol import preset
from cqm.storage import encode_json, read_json

RESULTS = Path(__file__).parent.parent / "results" / "paper"


@pytest.fixture(scope="module")
def again(tmp_path_factory):
    directory = tmp_path_factory.mktemp("results")
    for path in (RESULTS / "run.json", *RESULTS.glob("*.csv")):
        shutil.copy(path, directory)
    tables.write_tables(directory)
    return directory


def test_tables_follow_from_the_scores(again):
    names = sorted(path.name for path in (again / "tables").iterdir())
    assert names == sorted(path.name for path in (RESULTS / "tables").iterdir())
    for name in names:
        assert (RESULTS / "tables" / name).read_bytes() == (again / "tables" / name).read_bytes()


def test_the_run_was_the_papers_protocol():
    wanted = json.loads(encode_json(preset("paper").fixed()))
    assert read_json(RESULTS / "run.json")["protocol"] == wanted


def test_every_method_of_the_paper_ran_on_every_domain():
    results = records.load(RESULTS)
    protocol = preset("paper")
    for domain in protocol.domains:
        for method in protocol.stages[0].methods:
            if method != "ceilings":
                seeds = results.values(domain, method, "accuracy")
                assert tuple(seeds) == protocol.stages[0].seeds, (domain, method)
