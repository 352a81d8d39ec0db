import csv
from dataclasses import replace

import pytest
from support.synthetic_run import log_rows

from cqm.cli import main
from cqm.experiments import report, runner
from cqm.experiments.records import publish
from cqm.experiments.results import load
from cqm.experiments.studies.logs import PRESETS, LogsProtocol, LogsStudy, study_logs
from cqm.storage import read_json, write_json


@pytest.mark.filterwarnings("ignore:effects are set to zero")  # in directions of the nuisance
@pytest.mark.parametrize("behaviour", ["uniform", "state"])
def test_a_row_per_number_of_trajectories_and_estimator(behaviour):
    names = ("residual", "residual-unweighted")
    rows = study_logs(
        "cartpole-swingup",
        nuisance=4,
        behaviour=behaviour,
        protocol=LogsProtocol((600, 1200), test_states=40, test_draws=8),
        estimators=names,
        held_out=800,
    )
    assert [(row["trajectories"], row["estimator"]) for row in rows] == [
        (num, name) for num in (600, 1200) for name in names
    ]
    best = rows[2]
    assert best["excess_error"] < 0.4
    assert best["excess_error"] < rows[3]["excess_error"]
    assert best["r_score"] > rows[3]["r_score"]
    assert 0 <= best["regret_share"] < 1


def test_unknown_settings_are_refused():
    with pytest.raises(ValueError, match="behaviour must be"):
        study_logs("cartpole-swingup", behaviour="greedy")
    with pytest.raises(ValueError, match=r"unknown estimators \['magic'\]"):
        study_logs("cartpole-swingup", estimators=["magic"])


def test_a_setting_that_fails_is_kept_and_shown(tmp_path, monkeypatch):
    def run(function, tasks, cores, started_fn, inherited):
        for study, directory, job, settings in tasks:
            problem = "no memory" if job["behaviour"] == "state" else None
            if problem is None:
                rows = [row for row in log_rows("walker-walk") if row["nuisance"] == 0]
                write_json(study.record_file(tmp_path, job), {"rows": rows})
            yield (study, directory, job, settings), problem

    monkeypatch.setattr(runner, "run_side_by_side", run)
    protocol = replace(PRESETS["smoke"], settings=((0, "uniform"), (64, "state")))
    for _ in range(2):  # tried again, and not counted twice
        outcome = runner.run_study(
            LogsStudy(protocol, ["walker-walk"]), tmp_path, show_progress=False
        )
        assert outcome.problems == [
            "domain walker-walk, nuisance 64, behaviour state, seed 7: no memory"
        ]
    assert [failure["error"] for failure in load(tmp_path).failed] == ["no memory"]
    report.write(tmp_path)
    page = (tmp_path / "report.html").read_text()
    assert "1 job failed" in page
    assert "<td>state logs, nuisance 64</td><td>no memory</td>" in page


def test_records_by_former_names_are_combined(tmp_path):
    rows = [
        {"regret" if key == "regret_share" else key: value for key, value in row.items()}
        for row in log_rows("walker-walk")
        if row["nuisance"] == 0
    ]
    write_json(tmp_path / "logs" / "walker-walk-0-uniform-7.json", {"rows": rows})
    publish(LogsStudy(PRESETS["smoke"]), tmp_path)
    expected = [row for row in log_rows("walker-walk") if row["nuisance"] == 0]
    assert load(tmp_path).logs == expected


def test_the_study_is_resumed_and_refuses_other_settings(tmp_path, capsys):
    run = ["reproduce", "--study", "logs", "--domains", "cartpole-swingup", "--out", str(tmp_path)]
    assert main([*run, "--preset", "smoke"]) == 0
    table = (tmp_path / "logs.csv").read_bytes()
    rows = list(csv.DictReader(table.decode().splitlines()))
    assert {row["estimator"] for row in rows} == {
        *("branched", "residual", "residual-unweighted", "hindsight")
    }
    study = tmp_path / "logs-study.json"
    assert read_json(study)["study"]["trajectories"] == [400]
    (tmp_path / "logs.csv").unlink()
    study.rename(tmp_path / "logs.json")  # as earlier versions called it
    record = tmp_path / "logs" / "cartpole-swingup-0-uniform-7.json"
    written = record.stat().st_mtime_ns
    assert main([*run, "--preset", "smoke"]) == 0
    assert record.stat().st_mtime_ns == written
    assert (tmp_path / "logs.csv").read_bytes() == table
    capsys.readouterr()
    assert main([*run, "--preset", "quick"]) == 2
    assert "holds a run with different settings" in capsys.readouterr().err
    assert main([*run, "--preset", "smoke", "--methods", "cqm"]) == 2
    assert "leave out --methods" in capsys.readouterr().err
