"""Every ablation at its smallest size, run in this process; then resumed, redrawn and refused."""

import csv
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace

import pytest

from cqm import storage
from cqm.cli import main
from cqm.experiments import report, results, runner, studies
from cqm.experiments.ablations import ABLATIONS
from cqm.experiments.records import review
from cqm.experiments.runner import run_study
from cqm.experiments.studies.ablations import AblationStudy, study_of

CHECKED = {
    "rank": ("subspace", "cqm+effect"),
    "nuisance": ("limit", "cqm+effect"),
    "coupling": ("targets", "cqm+effect"),
    "horizon": ("cqm+effect",),
    "continuation": ("cqm+effect", "unrolled"),
    "rewards": ("cqm+effect", "direct"),
    "data": ("cqm+effect",),
    "actions": ("cqm+whiten",),
    "preprocessing": ("limit", "cqm"),
    "features": ("exact", "cqm-full-rank+whiten"),
    "prototypes": ("cqm",),
}
"""Some methods that each ablation must have rows of."""


def in_this_process(work_fn, tasks, cores, started_fn, inherited):
    for task in tasks:
        try:
            work_fn(task)
        except RuntimeError as error:
            yield task, str(error)
        else:
            yield task, None


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A directory with all ablations at smoke size."""
    directory = tmp_path_factory.mktemp("ablations")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runner, "run_side_by_side", in_this_process)
        for name in ABLATIONS:
            outcome = run_study(study_of(name, "smoke"), directory, show_progress=False)
            assert outcome.problems == [], name
    return directory


def rows_of(directory, name):
    return results.load(directory).ablations[name]


def test_every_ablation_is_checked():
    assert CHECKED.keys() == ABLATIONS.keys()


@pytest.mark.parametrize("name", ABLATIONS)
def test_every_ablation_runs(finished, name):
    ablation, rows = ABLATIONS[name], rows_of(finished, name)
    assert list(rows[0]) == ["domain", "seed", *ablation.axes, "method", "measure", "value"]
    assert set(CHECKED[name]) <= {row["method"] for row in rows}
    grid = ablation.grid("smoke")
    assert {row["domain"] for row in rows} == set(grid.domains)
    assert all(row["value"] == row["value"] for row in rows)  # nothing overflowed
    assert any(row["measure"] == "excess_error" for row in rows)
    for axis in ablation.axes:
        places = {str(row[axis]) for row in rows if row["method"] != "limit"}
        assert len(places) > 1, axis


def test_finished_jobs_leave_only_their_records(finished):
    kept = [path for path in (finished / "ablations").rglob("*") if path.is_file()]
    assert {path.suffix for path in kept} <= {".json", ".csv", ".lock", ""}
    assert not list((finished / "ablations").rglob("*.safetensors"))


def test_repeating_a_run_changes_nothing(finished):
    path = finished / "ablations" / "rank.csv"
    before = path.read_bytes()
    outcome = run_study(study_of("rank", "smoke"), finished, show_progress=False)
    assert (outcome.done, path.read_bytes()) == (1, before)


def test_the_report_is_drawn_again_without_training(finished, tmp_path, monkeypatch):
    shutil.copytree(finished, tmp_path / "copy")
    monkeypatch.setattr(AblationStudy, "do", None)
    assert main(["report", str(tmp_path / "copy")]) == 0
    page = (tmp_path / "copy" / "report.html").read_text()
    assert "ablations of the paper&#x27;s benchmark" in page
    figures = {path.stem for path in (tmp_path / "copy" / "figures").iterdir()}
    assert {f"ablation-{name}" for name in ABLATIONS} <= figures
    for name, ablation in ABLATIONS.items():
        assert f'id="ablation-{name}"' in page
        assert ablation.title.lower() in page.lower()
    # Published results have tables, and no records.
    for name in ABLATIONS:
        shutil.rmtree(tmp_path / "copy" / "ablations" / name)
    again = report.write(tmp_path / "copy")
    assert "paired-variance" in again
    assert (tmp_path / "copy" / "report.html").read_text() == page


def test_a_changed_table_is_refused(finished, tmp_path):
    shutil.copytree(finished, tmp_path / "copy")
    path = tmp_path / "copy" / "ablations" / "rank.csv"
    path.write_text(path.read_text().replace("subspace", "subspaces"))
    with pytest.raises(storage.DamagedFileError, match=r"rank.csv was changed"):
        results.load(tmp_path / "copy")


def test_a_damaged_record_is_named_and_run_again(finished, tmp_path, monkeypatch):
    directory = tmp_path / "copy"
    shutil.copytree(finished, directory)
    before = (directory / "ablations" / "prototypes.csv").read_bytes()
    study = study_of("prototypes", "smoke")
    first, second = (study.record_file(directory, job) for job in study.jobs())
    first.write_text(first.read_text().replace("accuracy", "agility"))
    other = json.loads(second.read_text())
    del other["seal"]
    other["rows"][0]["prototypes"] = "many"
    storage.write_sealed(second, other)
    assert [record.status for record in review(study, directory)] == ["damaged", "damaged"]
    done = []
    own = AblationStudy.do
    monkeypatch.setattr(runner, "run_side_by_side", in_this_process)
    monkeypatch.setattr(
        AblationStudy, "do", lambda self, *job: done.append(job[1]["point"]) or own(self, *job)
    )
    run_study(study, directory, show_progress=False)
    assert done == ["prototypes=1", "prototypes=2"]
    assert (directory / "ablations" / "prototypes.csv").read_bytes() == before


def test_other_sizes_do_not_fit_into_a_directory(finished):
    with pytest.raises(ValueError, match="holds a run with different settings"):
        run_study(study_of("rank", "quick"), finished, show_progress=False)


def test_jobs_are_known_to_belong_to_current_code(finished):
    assert studies.made_by_other_code(finished) == []
    states = [state["status"] for state in results.load(finished).jobs]
    assert set(states) == {"done"}


def test_jobs_of_all_sizes_stand_in_the_order_of_the_grid():
    for name, ablation in ABLATIONS.items():
        for size in ablation.grids:
            study = study_of(name, size)
            jobs = study.jobs()
            files = [study.record_file(runner.Path("run"), job) for job in jobs]
            assert len(set(files)) == len(jobs), (name, size)
            assert sorted(jobs, key=study.place)  # comparable


def test_a_killed_run_resumes(tmp_path):
    """Killed while a job trains, it continues from what the job kept, and ends with the same."""
    command = [sys.executable, "-m", "cqm", "ablate", "prototypes", "--preset", "smoke", "--out"]
    environment = {**os.environ, "MUJOCO_GL": "disable"}
    directory = tmp_path / "killed"
    process = subprocess.Popen(
        [*command, str(directory)],
        env=environment,
        stderr=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
    )
    first = directory / "ablations" / "prototypes" / "reacher-easy" / "7" / "prototypes=1.json"
    deadline = time.monotonic() + 240
    while not first.exists() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert first.exists()
    stamp = first.stat().st_mtime_ns
    done = subprocess.run([*command, str(directory)], env=environment, capture_output=True)
    assert done.returncode == 0, done.stderr
    assert first.stat().st_mtime_ns == stamp
    with (directory / "ablations" / "prototypes.csv").open() as file:
        assert {row["prototypes"] for row in csv.DictReader(file)} == {"1", "2"}


def test_the_list_shows_every_ablation_with_its_times(capsys):
    assert main(["ablate", "--list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["ablation", "quick", "full", "question"]
    assert [line.split()[0] for line in lines[1:-1]] == list(ABLATIONS)
    assert lines[-1].startswith("expected times on two cores; all full runs together: ")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "name an ablation; `cqm ablate --list` shows all of them"),
        (["ranks"], "unknown ablation 'ranks'; did you mean ['rank']? available: ['rank',"),
        (["rank", "--list"], "--list shows all ablations; leave out 'rank'"),
        (["rank", "--domains", "mars"], "no domains ['mars']; available: ['reacher-easy',"),
        (["rank", "--seeds", "-1"], "seeds must be one or more integers from 0 up; got [-1]"),
    ],
)
def test_mistakes_are_explained(tmp_path, capsys, options, message):
    assert main(["ablate", *options, "--out", str(tmp_path / "run")]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_the_command_runs_and_is_remembered(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(runner, "run_side_by_side", in_this_process)
    monkeypatch.setattr(
        AblationStudy,
        "do",
        lambda self, directory, job: {
            "rows": [{"rank": 8, "method": "cqm", "measure": "excess_error", "value": 0.25}],
            "seconds": {"physics": 1.0, "compilation": 0.0, "training": 2.0, "evaluation": 1.0},
        },
    )
    options = ["rank", "--preset", "smoke", "--seeds", "7", "8", "--out", str(tmp_path)]
    assert main(["ablate", *options]) == 0
    said = capsys.readouterr()
    assert "Expected time of all jobs: " in said.err
    run = storage.read_json(tmp_path / "ablations" / "rank.json")
    assert run["commands"] == [f"cqm ablate rank --preset smoke --seeds 7 8 --out {tmp_path}"]
    assert run["preset"] == "smoke"
    times = storage.read_json(tmp_path / "times.json")
    assert (times["training"], len(times["jobs"])) == (4.0, 2)
    page = (tmp_path / "report.html").read_text()
    assert "CQM-B 0.2500" in page


def test_a_failed_job_is_kept_and_shown(tmp_path, monkeypatch):
    monkeypatch.setattr(runner, "run_side_by_side", in_this_process)

    def failing(self, directory, job):
        raise RuntimeError("no memory")

    monkeypatch.setattr(AblationStudy, "do", failing)
    outcome = run_study(study_of("rank", "smoke"), tmp_path, show_progress=False)
    assert outcome.problems == [
        "ablation rank, domain reacher-easy, seed 7, point protocol: no memory"
    ]
    assert not (tmp_path / "ablations" / "rank.csv").exists()


def test_settings_name_every_point_and_fit():
    study = study_of("nuisance", "smoke")
    stored = study.settings()["study"]
    assert stored["points"]["nuisance=0"] == ["cqm+effect"]
    more = replace(study.grid, protocol=replace(study.grid.protocol, states=64))
    assert AblationStudy("nuisance", more).settings() != study.settings()
