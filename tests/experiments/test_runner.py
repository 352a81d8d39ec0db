"""The benchmark end to end at its smallest: what is done stays done, whatever happens."""

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest

import cqm
from cqm import storage
from cqm.cli import main
from cqm.experiments import report, results as records
from cqm.experiments.job import score
from cqm.experiments.methods import METHODS, Method, Predictor
from cqm.experiments.protocol import DOMAINS, PAPER, SEEDS, Job, preset
from cqm.experiments.runner import run_study
from cqm.experiments.studies.benchmark import Benchmark, job_directory
from cqm.experiments.studies.logs import PRESETS, LogsStudy

NAMES = ("cqm", "oracle", "zero", "random")
SMALL = preset("smoke").restricted(["cartpole-swingup"], None, NAMES)
OLD_RUN = Path(__file__).parents[1] / "data" / "v0.1" / "run"
FILES = ("scores", "ceilings", "curves", "regret_cdf", "spectrum", "alignment")


def rows_of(directory, name):
    return records.read_csv(directory / f"{name}.csv", records.COLUMNS[f"{name}.csv"])


def reproduce(protocol, directory):
    return run_study(Benchmark(protocol), directory, show_progress=False)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    directory = tmp_path_factory.mktemp("run")
    outcome = reproduce(SMALL, directory)
    assert outcome.problems == []
    return directory


def test_scores_of_the_limits_are_what_they_must_be(finished):
    rows = {row["method"]: row for row in rows_of(finished, "scores")}
    assert set(rows) == set(NAMES)
    assert rows["oracle"]["accuracy"] == 1.0
    assert rows["oracle"]["regret"] == 0.0
    assert rows["oracle"]["correlation"] == pytest.approx(1.0)
    assert rows["zero"]["accuracy"] == pytest.approx(1 / 3)
    assert rows["zero"]["effect_nmse"] == 1.0
    assert np.isnan(rows["zero"]["correlation"])
    assert rows["zero"]["ceiling_share"] == pytest.approx(0.0, abs=1e-12)
    assert abs(rows["random"]["accuracy"] - 1 / 3) < 0.1


def test_a_run_says_what_it_collects_and_which_jobs_start_and_end(tmp_path, capsys):
    protocol = preset("smoke").restricted(["cartpole-swingup"], None, ["zero"])
    run_study(Benchmark(protocol), tmp_path, show_progress=True)
    said = capsys.readouterr().err.splitlines()
    assert said[0] == f"2 jobs to run in {tmp_path}"
    assert said[1].startswith("collecting cartpole-swingup: 0/")
    for job in protocol.jobs():
        name = f"domain cartpole-swingup, seed {job.seed}, method {job.method}"
        assert said.index(f"started {name}") < said.index(f"finished {name}")
    assert said[-1].startswith("jobs: 2/2 jobs, ")


def test_every_file_is_there(finished):
    for name in FILES:
        assert rows_of(finished, name), name
    times = storage.read_json(finished / "times.json")
    parts = [times[name] for name in ("physics", "compilation", "training", "evaluation", "rest")]
    assert all(part >= 0 for part in parts)
    assert sum(parts) == pytest.approx(times["wall"] * len(os.sched_getaffinity(0)))


def test_shares_of_energy_add_up(finished):
    energies = [row["energy"] for row in rows_of(finished, "spectrum")]
    assert sum(energies) == pytest.approx(1.0)
    assert np.all(np.diff(energies) <= 0)
    assert len(energies) <= 5  # no more than the native dimension, though 69 are observed


def test_repeating_a_finished_run_changes_nothing(finished):
    before = {name: (finished / f"{name}.csv").read_bytes() for name in FILES}
    record = job_directory(finished, Job("cartpole-swingup", 7, "cqm")) / "record.json"
    stamp = record.stat().st_mtime_ns
    reproduce(SMALL, finished)
    assert record.stat().st_mtime_ns == stamp
    assert {name: (finished / f"{name}.csv").read_bytes() for name in FILES} == before


def test_another_protocol_in_the_same_directory_is_refused(finished):
    message = r"different settings or versions:\n  protocol.states: 64 -> 65\nchoose another"
    with pytest.raises(ValueError, match=message):
        reproduce(replace(SMALL, states=65), finished)


def copied(finished, directory, **changes):
    """A copy of a run whose stored protocol has other entries; None removes one."""
    shutil.copytree(finished, directory)
    for path in (directory / "run.json", *directory.glob("jobs/*/*/*/record.json")):
        content = storage.read_json(path)
        del content["seal"]
        run = content if path.name == "run.json" else content["settings"]
        protocol = {**run["protocol"], **changes}
        run["protocol"] = {key: value for key, value in protocol.items() if value is not None}
        storage.write_sealed(path, content)
    return directory


def test_a_setting_that_an_older_run_lacks_counts_as_its_default(finished, tmp_path):
    assert reproduce(SMALL, copied(finished, tmp_path / "older", nuisance=None)).problems == []
    with pytest.raises(ValueError, match=r"\n  protocol.gravity: 9.81 -> null\n"):
        reproduce(SMALL, copied(finished, tmp_path / "other", gravity=9.81))
    with pytest.raises(ValueError, match=r"\n  protocol.states: 20000 -> 64\n"):
        reproduce(SMALL, copied(finished, tmp_path / "larger", states=None))


def test_a_failed_job_is_reported_and_tried_again(tmp_path):
    protocol = SMALL.restricted(None, None, ["oracle", "zero"])
    in_the_way = job_directory(tmp_path, Job("cartpole-swingup", 7, "zero"))
    in_the_way.parent.mkdir(parents=True)
    in_the_way.write_text("not a directory")
    outcome = reproduce(protocol, tmp_path)
    assert [job["method"] for job in outcome.failed] == ["zero"]
    assert outcome.problems[0].startswith("domain cartpole-swingup, seed 7, method zero: ")
    assert storage.read_json(tmp_path / "run.json")["failed"][0]["method"] == "zero"
    assert [row["method"] for row in rows_of(tmp_path, "scores")] == ["oracle"]
    reproduce(SMALL.restricted(None, None, ["random"]), tmp_path)  # does not try it again
    assert storage.read_json(tmp_path / "run.json")["failed"][0]["method"] == "zero"
    in_the_way.unlink()
    assert reproduce(protocol, tmp_path).failed == ()
    assert storage.read_json(tmp_path / "run.json")["failed"] == []
    assert len(rows_of(tmp_path, "scores")) == 3


def test_an_unfinished_run_has_a_report(finished, tmp_path):
    for name in ("run.json", "jobs"):  # no CSV file: they are written last
        copy = shutil.copytree if (finished / name).is_dir() else shutil.copy
        copy(finished / name, tmp_path / name)
    assert main(["report", str(tmp_path)]) == 0
    assert len(rows_of(tmp_path, "scores")) == len(rows_of(finished, "scores"))
    assert (tmp_path / "report.html").exists()


@pytest.mark.slow
def test_killed_at_random_instants_the_tables_are_the_same(finished, tmp_path):
    rng = random.Random(0)
    command = [sys.executable, "-m", "cqm", "reproduce", "--preset", "smoke"]
    command += ["--domains", "cartpole-swingup", "--methods", *NAMES, "--out", str(tmp_path)]
    instants = sorted(rng.uniform(2, 10) for _ in range(5))
    kills = 0
    for attempt in range(20):
        process = subprocess.Popen(command, start_new_session=True, stderr=subprocess.DEVNULL)
        try:
            process.wait(timeout=instants[attempt] if attempt < 5 else 300)
        except subprocess.TimeoutExpired:
            os.kill(process.pid, signal.SIGKILL)
            process.wait()
            kills += 1
            time.sleep(0.2)
        else:
            break
    assert process.returncode == 0
    assert kills
    for name in FILES:
        expected = (finished / f"{name}.csv").read_bytes()
        assert (tmp_path / f"{name}.csv").read_bytes() == expected, name


def test_presets_are_the_papers_protocol():
    paper = preset("paper")
    assert paper.domains == DOMAINS
    assert paper.stages[0].seeds == SEEDS == (7, 8, 9, 10, 11)
    assert set(PAPER) <= set(paper.stages[0].methods)
    assert (paper.states, paper.test_states, paper.training.updates) == (20_000, 4_000, 4_000)
    assert (paper.horizon, paper.discount, paper.nuisance) == (12, 0.95, 64)


def test_rewards_are_fixed_unit_vectors_for_each_domain():
    training, held_out = preset("paper").rewards(6)
    assert training.shape == (32, 6)
    assert held_out.shape == (16, 6)
    np.testing.assert_allclose(np.linalg.norm([*training, *held_out], axis=1), 1)
    again = preset("quick").rewards(6)
    np.testing.assert_array_equal(training, again[0])
    np.testing.assert_array_equal(held_out, again[1])


def test_unknown_domains_and_methods_are_refused():
    with pytest.raises(ValueError, match=r"unknown domains \['walker'\]"):
        preset("quick").restricted(domains=["walker"])
    with pytest.raises(ValueError, match=r"unknown method 'default\+effect'"):
        Benchmark(preset("smoke").restricted(methods=["default+effect"]))


class Overflowing(Predictor):
    def vectors(self, branches):
        predicted = np.zeros(branches.outcomes[:, 0].shape)
        predicted[0] = np.inf
        return predicted


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
def test_a_prediction_that_overflowed_has_undefined_scores(tmp_path):
    world = cqm.load_world("cartpole-swingup", nuisance=4, seed=0)
    sets = {"test": cqm.collect(world, states=6), "ceiling": cqm.collect(world, states=6, draws=4)}
    record = score(METHODS["world"], Overflowing(), sets, np.eye(len(world.feature_names))[:2])
    (row,) = record["scores"]
    assert row["effect_nmse"] is None
    assert row["absolute_nmse"] is None
    storage.write_json(tmp_path / "record.json", record)  # refuses what is not JSON
    msgspec.convert(record, Benchmark.schema)


def test_a_method_may_be_added_with_its_conditioning():
    protocol = preset("quick").restricted(["reacher-easy"], [3], ["world+whiten"])
    jobs = [job for job in protocol.jobs() if job.method != "ceilings"]
    assert jobs == [Job("reacher-easy", 3, "world+whiten")]
    assert preset("quick").restricted(["reacher-easy"], [3, 3], ["world+whiten"]) == protocol


BASELINE = """
import numpy as np
from cqm.experiments.methods import Predictor

class MeanEffect(Predictor):
    def __init__(self, task):
        self.mean = task.branches.effects().mean(axis=(0, 1))

    def vectors(self, branches):
        return np.repeat(self.mean[None], len(branches), axis=0)
"""


def test_a_baseline_is_one_class_and_one_registry_entry(finished, tmp_path, monkeypatch):
    (tmp_path / "mean_effect.py").write_text(BASELINE)
    monkeypatch.syspath_prepend(tmp_path)
    entry = Method("mean", "Mean effect", "mean_effect:MeanEffect", "effects")
    monkeypatch.setitem(METHODS, "mean", entry)
    run = tmp_path / "run"
    shutil.copytree(finished, run)
    assert reproduce(SMALL.restricted(None, None, ["mean"]), run).problems == []
    (row,) = [row for row in rows_of(run, "scores") if row["method"] == "mean"]
    assert 0 < row["effect_nmse"] < 1
    report.write(run)
    for kind, suffix in (("tables", "md"), ("figures", "svg")):
        texts = [path.read_text() for path in (run / kind).glob(f"*.{suffix}")]
        assert any("Mean effect" in text for text in texts), kind
    assert "Mean effect" in (run / "report.html").read_text()


def test_a_run_of_version_0_1_is_read_and_continued(finished, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(OLD_RUN, run)
    for name in (*FILES, "logs"):
        (run / f"{name}.csv").unlink()
    assert main(["report", str(run)]) == 0
    for name in FILES:
        assert (run / f"{name}.csv").read_bytes() == (OLD_RUN / f"{name}.csv").read_bytes()
    logs = (OLD_RUN / "logs.csv").read_text().replace(",regret,", ",regret_share,")
    assert (run / "logs.csv").read_text() == logs
    # The run was made with other versions of the software, and these have to be the same.
    versions = storage.read_json(finished / "run.json")["versions"]
    for name in ("run.json", "logs.json"):
        storage.write_json(run / name, {**storage.read_json(run / name), "versions": versions})
    outcome = reproduce(preset("smoke").restricted(["cartpole-swingup"]), run)
    assert (outcome.problems, outcome.done) == ([], 10)
    assert not (run / "branches").exists()  # nothing was missing
    # Its study of logs trained every seed with batch seed 0, which is no longer done.
    with pytest.raises(ValueError, match=r"\n  study.training.seed: 0 -> null\n"):
        run_study(LogsStudy(PRESETS["smoke"], ["cartpole-swingup"]), run, show_progress=False)
