import math
import os

import numpy as np
import pytest
from hypothesis import given, strategies as st
from support.synthetic_run import log_rows, world_rows, write_run

from cqm.experiments.results import COLUMNS, load, read_csv, with_current_names, write_csv
from cqm.storage import DamagedFileError, write_json

TYPES = {"name": str, "seed": int, "value": float}


def test_rows_round_trip(tmp_path):
    path = tmp_path / "x.csv"
    rows = [
        {"name": 'a,"b"\nc', "seed": np.int64(7), "value": np.float64(0.1)},
        {"name": "é", "seed": -1, "value": np.float32(0.1)},
        {"name": "none", "seed": 0, "value": None},
        {"name": "nan", "seed": 0, "value": math.nan},
        {"name": "inf", "seed": 0, "value": -math.inf},
    ]
    write_csv(path, rows, TYPES)
    read = read_csv(path, TYPES)
    assert [row["name"] for row in read] == ['a,"b"\nc', "é", "none", "nan", "inf"]
    assert [row["seed"] for row in read] == [7, -1, 0, 0, 0]
    assert read[0]["value"] == 0.1
    assert read[1]["value"] == float(np.float32(0.1))
    assert math.isnan(read[2]["value"])
    assert math.isnan(read[3]["value"])
    assert read[4]["value"] == -math.inf


def test_the_file_is_plain(tmp_path):
    write_csv(tmp_path / "x.csv", [{"seed": 7, "value": 0.1, "name": "a"}], TYPES)
    assert (tmp_path / "x.csv").read_bytes() == b"name,seed,value\na,7,0.1\n"
    assert os.listdir(tmp_path) == ["x.csv"]


@given(value=st.floats(allow_nan=False))
def test_every_float_is_read_as_it_was_written(tmp_path_factory, value):
    path = tmp_path_factory.mktemp("floats") / "x.csv"
    write_csv(path, [{"value": value}], ["value"])
    assert read_csv(path, {"value": float})[0]["value"] == value


@pytest.mark.parametrize("row", [{"name": "a"}, {**dict.fromkeys(TYPES, 1), "more": 1}])
def test_a_row_with_other_columns_is_refused(tmp_path, row):
    with pytest.raises(ValueError, match=r"must have the columns \['name', 'seed', 'value'\]; got"):
        write_csv(tmp_path / "x.csv", [row], TYPES)
    assert os.listdir(tmp_path) == []


def test_only_text_and_numbers_are_written(tmp_path):
    with pytest.raises(ValueError, match="text or numbers; got list"):
        write_csv(tmp_path / "x.csv", [{"name": []}], ["name"])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is truncated"),
        (b"name,seed,value\na,7,0.1", "is truncated"),
        (b"name,seed\na,7\n", r"must have the columns .*'value'\]; got \['name', 'seed'\]"),
        (b"name,value,seed\n", "must have the columns"),
        (b"name,seed,value\na,7\n", "line 2: expected 3 cells; got 2"),
        (b"name,seed,value\na,7,0.1\nb,x,1\n", "line 3: .*'x'"),
        (b"name,seed,value\na,7,high\n", "line 2: .*'high'"),
        (b"name,seed,value\na,,1\n", "line 2: a required cell is empty"),
        (b"name,seed,value\n\xff,7,1\n", "is not UTF-8 text"),
    ],
)
def test_a_damaged_file_is_named(tmp_path, content, message):
    path = tmp_path / "x.csv"
    path.write_bytes(content)
    with pytest.raises(DamagedFileError, match=message) as caught:
        read_csv(path, TYPES)
    assert str(path) in str(caught.value)


def test_a_run_is_loaded(tmp_path):
    write_run(tmp_path, domains=("reacher-easy", "walker-walk"), seeds=(7, 8), beyond=("default",))
    results = load(tmp_path)
    assert results.domains == ["reacher-easy", "walker-walk"]
    assert results.seeds == [7, 8]
    assert "default" in results.methods
    assert sorted(results.values("reacher-easy", "cqm", "accuracy")) == [7, 8]
    assert results.values("reacher-easy", "no such", "accuracy") == {}
    assert results.chance("reacher-easy") == 0.2
    assert math.isnan(results.chance("no such"))
    assert len(results.energies("walker-walk")) == 24
    assert math.fsum(results.energies("walker-walk")) == pytest.approx(1)
    assert results.times["wall"] == 401.5


def test_ceilings_are_means_with_the_error_of_a_mean(tmp_path):
    write_run(tmp_path, domains=("walker-walk",), seeds=(7, 8), methods=("cqm",), beyond=())
    rows = read_csv(tmp_path / "ceilings.csv", COLUMNS["ceilings.csv"])
    for row, value, error in zip(rows, (0.4, 0.6), (0.03, 0.04), strict=True):
        row.update(accuracy_ceiling=value, accuracy_ceiling_se=error)
    write_csv(tmp_path / "ceilings.csv", rows, COLUMNS["ceilings.csv"])
    mean, error = load(tmp_path).ceiling("walker-walk", "accuracy_ceiling")
    assert mean == pytest.approx(0.5)
    assert error == pytest.approx(0.025)  # √(0.03² + 0.04²)/2
    assert math.isnan(load(tmp_path).ceiling("no such", "accuracy_ceiling")[0])


def test_means_are_rounded_once_and_so_the_same_on_every_python(tmp_path):
    """Python 3.12 sums floats more exactly than 3.11, which shows in the last digit of tables."""
    seeds = tuple(range(10))
    write_run(tmp_path, domains=("walker-walk",), seeds=seeds, methods=("cqm",), beyond=())
    rows = read_csv(tmp_path / "ceilings.csv", COLUMNS["ceilings.csv"])
    for row in rows:
        row.update(accuracy_ceiling=0.1)
    write_csv(tmp_path / "ceilings.csv", rows, COLUMNS["ceilings.csv"])
    assert load(tmp_path).ceiling("walker-walk", "accuracy_ceiling")[0] == 0.1


@pytest.mark.parametrize("name", ["run.json", "scores.csv"])
def test_what_a_run_must_have_is_named(tmp_path, name):
    write_run(tmp_path, domains=("reacher-easy",), seeds=(7,), methods=("cqm",), beyond=())
    (tmp_path / name).unlink()
    if name == "scores.csv":
        assert load(tmp_path).scores == []  # the study of logs has results
        (tmp_path / "logs.csv").unlink()
    with pytest.raises(FileNotFoundError, match=name):
        load(tmp_path)


@pytest.mark.parametrize("name", [*(n for n in COLUMNS if n != "scores.csv"), "times.json"])
def test_what_a_run_may_lack_is_empty(tmp_path, name):
    write_run(tmp_path, domains=("reacher-easy",), seeds=(7,), methods=("cqm",), beyond=())
    write_csv(tmp_path / "worlds.csv", world_rows("clock"), COLUMNS["worlds.csv"])
    assert getattr(load(tmp_path), name.partition(".")[0])
    (tmp_path / name).unlink()
    assert not getattr(load(tmp_path), name.partition(".")[0])


def test_a_run_without_scores_is_explained(tmp_path):
    write_run(tmp_path, domains=(), beyond=())
    with pytest.raises(ValueError, match="no method has been scored yet"):
        load(tmp_path)


def test_a_job_with_two_scores_is_damage(tmp_path):
    write_run(tmp_path, domains=("reacher-easy",), seeds=(7, 7), methods=("cqm",), beyond=())
    with pytest.raises(DamagedFileError, match="two rows for domain 'reacher-easy', seed 7"):
        load(tmp_path).values("reacher-easy", "cqm", "accuracy")


def test_logs_by_former_names_are_read(tmp_path):
    write_run(tmp_path, domains=("reacher-easy",), seeds=(7,), methods=("cqm",), beyond=())
    now = load(tmp_path).logs
    path = tmp_path / "logs.csv"
    header, line, rest = path.read_text().split("\n", 2)
    path.write_text("\n".join([header.replace("regret_share", "regret"), line, rest]))
    assert load(tmp_path).logs == now
    row = {"domain": "d", "regret": 0.5}
    assert with_current_names("logs.csv", row) == {"domain": "d", "regret_share": 0.5}
    assert with_current_names("scores.csv", row) == row  # where regret is something else


def test_rows_of_the_study_of_logs_round_trip(tmp_path):
    rows = log_rows("walker-walk")
    write_csv(tmp_path / "logs.csv", rows, COLUMNS["logs.csv"])
    assert load(tmp_path).logs == rows


def test_the_settings_of_the_study_of_logs_by_either_name(tmp_path):
    write_run(tmp_path, domains=("reacher-easy",), seeds=(7,), methods=("cqm",), beyond=())
    assert load(tmp_path).study == {}
    write_json(tmp_path / "logs.json", {"study": {"test_draws": 8}, "failed": [{"seed": 7}]})
    assert load(tmp_path).study["study"] == {"test_draws": 8}
    assert load(tmp_path).failed == [{"seed": 7}]
    write_json(tmp_path / "logs-study.json", {"study": {"test_draws": 32}})
    assert load(tmp_path).study["study"] == {"test_draws": 32}
