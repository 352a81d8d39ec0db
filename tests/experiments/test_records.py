"""Records are used only if they are intact, their job's own, and of the same run."""

import json
import shutil
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from support.synthetic_run import LOGGED, log_rows

from cqm import storage
from cqm.cli import main
from cqm.experiments import report, results, runner, studies
from cqm.experiments.protocol import Protocol, preset
from cqm.experiments.records import publish, review
from cqm.experiments.studies.benchmark import Benchmark
from cqm.experiments.studies.logs import PRESETS, LogsStudy

OLD_RUN = Path(__file__).parents[1] / "data" / "v0.1" / "run"
CODE = {"digest": "today"}
DONE = []


@dataclass(frozen=True)
class Quick(LogsStudy):
    """The study of logs with made-up rows."""

    def do(self, directory, job):
        DONE.append(job)
        return {"rows": rows_of(job)}

    def code(self, job):
        return CODE["digest"]


STUDY = Quick(replace(PRESETS["smoke"], settings=LOGGED), ["walker-walk"])


def rows_of(job):
    return [row for row in log_rows("walker-walk") if all(row[k] == v for k, v in job.items())]


@pytest.fixture(autouse=True)
def in_this_process(monkeypatch):
    def run(work_fn, tasks, cores, started_fn, inherited):
        for task in tasks:
            started_fn(task)
            work_fn(task)
            yield task, None

    monkeypatch.setattr(runner, "run_side_by_side", run)
    monkeypatch.setitem(CODE, "digest", "today")
    DONE.clear()


def run(directory, study=STUDY):
    DONE.clear()
    return runner.run_study(study, directory, command="cqm reproduce", show_progress=True)


@pytest.fixture
def finished(tmp_path):
    assert run(tmp_path).problems == []
    assert len(DONE) == 3
    return tmp_path


def record(directory, nuisance=64, behaviour="state"):
    return directory / "logs" / f"walker-walk-{nuisance}-{behaviour}-7.json"


def edit(path, **changes):
    """Change a file's entries and leave the seal."""
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def reseal(path, **changes):
    content = {**json.loads(path.read_text()), **changes}
    del content["seal"]
    storage.write_sealed(path, content)


def test_a_record_says_what_made_it(finished):
    content = storage.read_json(record(finished))
    assert content["job"] == {
        "domain": "walker-walk",
        "nuisance": 64,
        "behaviour": "state",
        "seed": 7,
    }
    assert (content["schema"], content["code"]) == (2, "today")
    assert content["settings"]["study"]["test_states"] == 16
    assert "jax" in content["settings"]["versions"]


DAMAGES = {
    "empty object": (lambda path: path.write_text("{}"), "is not valid: .*`rows`"),
    "empty file": (lambda path: path.write_text(""), "is not valid JSON"),
    "changed row": (lambda path: edit(path, rows=[]), "its checksum is wrong"),
    "changed code": (lambda path: edit(path, code="other"), "its checksum is wrong"),
    "changed schema": (lambda path: edit(path, schema=1), "its checksum is wrong"),
    "another's": (
        lambda path: shutil.copy(path.with_name("walker-walk-0-uniform-7.json"), path),
        r"is the record of another job, \{.*'nuisance': 0",
    ),
    "another run's": (
        lambda path: reseal(path, settings={"study": {"test_states": 5}, "versions": {}}),
        "(?s)belongs to a run with other settings or versions:\n.*study.test_states: 16 -> 5",
    ),
    "no rows": (lambda path: reseal(path, rows=[]), "is not valid: it must have rows"),
    "unknown entry": (lambda path: reseal(path, more=1), "is not valid: .*`more`"),
    "an old record of another job": (
        lambda path: storage.write_json(path, {"rows": rows_of({"nuisance": 0})}),
        "is not valid: it must have rows, all of them of the setting",
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_record_that_cannot_be_used_is_named_and_only_its_job_run_again(finished, capsys, damage):
    table = (finished / "logs.csv").read_bytes()
    damage_fn, message = DAMAGES[damage]
    damage_fn(record(finished))
    (bad,) = [found for found in review(STUDY, finished) if not found.is_done]
    assert bad.status == "damaged"
    assert str(record(finished)) in bad.problem
    with pytest.raises(storage.DamagedFileError, match=message):
        raise storage.DamagedFileError(bad.problem)
    assert "delete it and rerun the `cqm reproduce` command" in bad.problem
    capsys.readouterr()
    run(finished)
    assert [job["behaviour"] for job in DONE] == ["state"]
    said = capsys.readouterr().err
    assert f"resuming {finished}: 2 of 3 jobs done" in said
    assert f"behaviour state, seed 7 again: {record(finished)}" in said
    assert (finished / "logs.csv").read_bytes() == table


def test_a_report_leaves_damaged_records_out_and_says_so(finished, capsys):
    record(finished).write_text("{}")
    capsys.readouterr()
    assert main(["report", str(finished)]) == 1
    said = capsys.readouterr()
    assert f"left out: {record(finished)} is not valid" in said.err
    assert "1 job left out (the record is damaged): state logs, nuisance 64 (Walker, seed 7)" in (
        said.out
    )
    page = (finished / "report.html").read_text()
    assert "<td>state logs, nuisance 64</td><td>left out (the record is damaged)</td>" in page
    assert "1 job left out because the record is damaged" in page
    assert {row["behaviour"] for row in results.load(finished).logs} == {"uniform"}


def test_a_file_that_no_job_is_called_is_named(finished):
    stray = finished / "logs" / "notes.json"
    stray.write_text("{}")
    (bad,) = [found for found in publish(STUDY, finished) if not found.is_done]
    assert bad.problem == f"{stray} is not named after a job of the study; delete it"
    assert results.load(finished).with_status("damaged") == [{"file": "logs/notes.json"}]


def test_records_of_other_code_are_kept_and_marked(finished, capsys):
    CODE["digest"] = "tomorrow"
    record(finished, 0, "uniform").unlink()
    capsys.readouterr()
    run(finished)
    assert [job["nuisance"] for job in DONE] == [0]
    said = capsys.readouterr().err
    assert "kept 2 jobs run with different code: domain walker-walk, nuisance 64" in said
    assert "delete their records or choose another directory" in said
    summary = report.write(finished)
    assert (
        "2 jobs run with a different version of the code from the one that wrote these tables: "
        "uniform logs" in summary
    )
    page = (finished / "report.html").read_text()
    assert "2 jobs run with different code." in page
    assert (
        "<td>run with a different version of the code from the one that wrote these tables</td>"
        "<td>Walker, seed 7" in page
    )


def test_missing_jobs_are_listed(finished):
    record(finished).unlink()
    publish(STUDY, finished)
    assert "1 job missing (not run yet, or failed): state logs" in report.write(finished)
    assert (
        "<td>missing (not run yet, or failed)</td><td>Walker, seed 7</td>"
        in (finished / "report.html").read_text()
    )


def test_a_whole_run_of_one_code_says_so(finished):
    report.write(finished)
    page = (finished / "report.html").read_text()
    assert "All 3 jobs were run by the code that wrote the tables." in page


def test_results_without_their_records_know_their_code(finished, tmp_path_factory, capsys):
    published = tmp_path_factory.mktemp("published")
    for path in finished.glob("*.*"):
        shutil.copy(path, published)
    assert [state["code"] for state in results.load(published).jobs] == ["today"] * 3
    assert main(["report", str(published)]) == 0
    assert "3 jobs used code that differs from the installed version" in capsys.readouterr().err
    assert len(studies.made_by_other_code(published)) == 3


def test_a_lost_run_file_is_written_again_from_the_same_settings_only(finished):
    before = storage.read_json(finished / "logs-study.json")
    (finished / "logs-study.json").unlink()
    with pytest.raises(
        ValueError, match=r"different settings or versions:\n.*test_states: 16 -> 9"
    ):
        run(finished, replace(STUDY, protocol=replace(STUDY.protocol, test_states=9)))
    run(finished)
    assert DONE == []
    assert storage.read_json(finished / "logs-study.json") == before


def test_a_changed_run_file_is_named(finished):
    edit(finished / "logs-study.json", commands=["rm"])
    for function in (run, results.load):
        with pytest.raises(
            storage.DamagedFileError, match=r"logs-study.json was changed: .* rerun"
        ):
            function(finished)


@pytest.mark.parametrize("other", ["empty", "record"])
def test_what_is_no_run_file_is_named(finished, other):
    path = finished / "logs-study.json"
    path.write_text("{}" if other == "empty" else record(finished).read_text())
    for function in (run, lambda directory: publish(STUDY, directory)):
        with pytest.raises(storage.DamagedFileError, match=r"logs-study.json .*lacks study, vers"):
            function(finished)


def test_another_runs_run_file_is_named(finished):
    reseal(finished / "logs-study.json", study={"test_states": 99})
    with pytest.raises(storage.DamagedFileError, match="does not belong to these results"):
        results.load(finished)


@pytest.mark.parametrize("name", ["logs.csv", "jobs.json", "checksums.json"])
def test_a_changed_result_is_named_and_rebuilt(finished, name):
    path = finished / name
    before = path.read_bytes()
    path.write_bytes(before.replace(b"7", b"8", 1))
    with pytest.raises(storage.DamagedFileError, match=rf"{name} was changed: ") as caught:
        results.load(finished)
    if name == "checksums.json":
        assert "delete it and run `cqm report" in str(caught.value)
        path.unlink()
    else:
        assert f"run `cqm report {finished}`, which writes the tables again" in str(caught.value)
    publish(STUDY, finished)
    assert path.read_bytes() == before


def test_a_result_that_vanished_or_appeared_is_named(finished):
    shutil.copy(finished / "logs.csv", finished / "spectrum.csv")
    with pytest.raises(storage.DamagedFileError, match=r"spectrum.csv is not listed in checksums"):
        results.load(finished)
    (finished / "spectrum.csv").rename(finished / "scores.csv")
    (finished / "logs.csv").unlink()
    shutil.copy(finished / "logs-study.json", finished / "run.json")
    with pytest.raises(storage.DamagedFileError, match=r"logs.csv is missing; run `cqm report"):
        results.load(finished)


def test_a_list_of_jobs_that_vanished_is_named(finished):
    (finished / "jobs.json").unlink()
    with pytest.raises(storage.DamagedFileError, match=r"jobs.json is missing; run `cqm report"):
        results.load(finished)


def test_publishing_one_study_does_not_vouch_for_the_files_of_another(finished):
    for name in ("run.json", "scores.csv"):
        shutil.copy(OLD_RUN / name, finished)
    (finished / "checksums.json").unlink()
    publish(STUDY, finished)
    with open(finished / "scores.csv", "a") as file:
        file.write("\n")
    publish(STUDY, finished)
    with pytest.raises(storage.DamagedFileError, match=r"scores.csv was changed"):
        results.load(finished)


def test_results_of_earlier_versions_get_checksums_from_the_first_report(tmp_path):
    for path in OLD_RUN.glob("*.*"):
        shutil.copy(path, tmp_path)
    loaded = results.load(tmp_path)
    assert loaded.jobs is None
    assert main(["report", str(tmp_path)]) == 0
    assert (
        "The code that made these results was not recorded."
        in (tmp_path / "report.html").read_text()
    )
    edit(tmp_path / "run.json", preset="paper")
    with pytest.raises(storage.DamagedFileError, match=r"run.json was changed"):
        results.load(tmp_path)


class TestOldBenchmark:
    """Records of version 0.1, which have no seal."""

    @pytest.fixture
    def old(self, tmp_path):
        return shutil.copytree(OLD_RUN, tmp_path / "run")

    def statuses(self, directory):
        found = review(Benchmark(Protocol("", ())), directory)
        return {record.job.get("method"): record.status for record in found}

    def record(self, directory, method):
        return directory / "jobs" / "cartpole-swingup" / "7" / method / "record.json"

    def test_are_made_by_unknown_code(self, old):
        assert set(self.statuses(old).values()) == {"unknown code"}
        assert len(self.statuses(old)) == len(
            preset("smoke").restricted(["cartpole-swingup"]).jobs()
        )

    @pytest.mark.parametrize(
        "damage_fn",
        [
            lambda path: path.write_text("{}"),
            lambda path: shutil.copy(path.parents[1] / "ceilings" / "record.json", path),
            lambda path: edit(path, scores=[]),
            lambda path: edit(path, scores=[{"accuracy": 1.0}]),
            lambda path: edit(path, alignment=[{"oracle": "x", "predicted": 0.0, "count": 1}]),
            lambda path: edit(path, seal="0"),
            lambda path: edit(path, schema=2),
            lambda path: edit(path, rows=[]),
        ],
    )
    def test_must_fit(self, old, damage_fn):
        damage_fn(self.record(old, "cqm"))
        found = self.statuses(old)
        assert [method for method, status in found.items() if status == "damaged"] == ["cqm"]

    def test_of_no_job_are_named(self, old):
        for place in ("mars/7/cqm", "cartpole-swingup/first/cqm"):
            path = old / "jobs" / place / "record.json"
            path.parent.mkdir(parents=True)
            shutil.copy(self.record(old, "cqm"), path)
        found = review(Benchmark(Protocol("", ())), old)
        assert sorted(r.job["file"] for r in found if r.status == "damaged") == [
            "jobs/cartpole-swingup/first/cqm/record.json",
            "jobs/mars/7/cqm/record.json",
        ]


def test_no_temporary_file_stays_after_a_resumed_run(finished):
    for place in ("", "logs", "logs/branches/7/some-set"):
        (finished / place).mkdir(parents=True, exist_ok=True)
        with storage.atomic_file(finished / place / "x.json"):
            (leftover,) = (finished / place).glob(".*.partial")
            content = leftover.read_bytes()
        leftover.write_bytes(content)
        (finished / place / "x.json").unlink()
    assert len(list(finished.rglob(".*"))) == 3
    run(finished)
    assert list(finished.rglob(".*")) == []


def test_an_interrupted_run_says_what_was_kept(tmp_path, monkeypatch):
    def stop(stop_at):
        def do(self, directory, job):
            if job["behaviour"] == stop_at:
                raise KeyboardInterrupt
            return {"rows": rows_of(job)}

        monkeypatch.setattr(Quick, "do", do)

    stop("uniform")
    with pytest.raises(KeyboardInterrupt, match=r"^no job is done; rerun the command to resume"):
        run(tmp_path)
    stop("state")
    with pytest.raises(KeyboardInterrupt, match=f"^2 of 3 jobs done and kept; .* {tmp_path}$"):
        run(tmp_path)
    assert [found.status for found in review(STUDY, tmp_path)] == ["done", "done", "missing"]
    monkeypatch.setattr(Quick, "code", stop)  # anything that is interrupted before the first job
    monkeypatch.setattr(
        runner.records, "review", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt)
    )
    with pytest.raises(KeyboardInterrupt, match=r"^no job was started; rerun the command"):
        run(tmp_path)


def test_a_second_run_in_the_directory_is_refused(finished, monkeypatch):
    def second(*_):
        run(finished)

    record(finished).unlink()
    monkeypatch.setattr(Quick, "do", second)
    with pytest.raises(ValueError, match=rf"{finished} is in use by process \d+ on .*; wait until"):
        run(finished)
