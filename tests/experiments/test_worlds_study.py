"""The study of worlds with made-up models; the last test fits the real ones."""

import csv
import math
from dataclasses import dataclass, replace

import numpy as np
import pytest

import cqm
from cqm import storage
from cqm.cli import main
from cqm.experiments import report, runner, studies, zoo
from cqm.experiments.records import review
from cqm.experiments.results import COLUMNS
from cqm.experiments.studies import worlds
from cqm.experiments.studies.worlds import PRESETS, WORLDS, WorldsProtocol, WorldsStudy
from cqm.quotient import center

SHARES = {"default": 0.5, "constant": 0.0, "ridge": 0.9, "direct": 0.5, "paper": 0.4}


@dataclass(frozen=True)
class Candidate:
    """As in `EffectModel.comparison_`."""

    candidate: str
    error: float
    standard_error: float = 0.01
    seconds: float = 2.0
    note: str = ""


ROWS = (
    Candidate("constant", 1.0),
    Candidate("ridge", 0.2),
    Candidate("direct", 0.1),
    Candidate("unrolled", math.nan, math.nan, note="needs per_step=True"),
)


class Model:
    """Predicts a share of the clock's effects, which are linear in the action."""

    def __init__(self, name, branches):
        self.mean = branches.effects().mean(axis=(0, 1))
        self.share = SHARES[name]

    def effect(self, observations):
        return np.broadcast_to(self.share * self.mean, (len(observations), *self.mean.shape))


class Default(worlds._Studied):
    """Chooses the direct network, and can tell what each candidate is alone."""

    def __init__(self, branches, reused):
        self.branches, self.reused, self.method_, self.comparison_ = (
            branches,
            reused,
            "direct",
            ROWS,
        )

    def effect(self, observations):
        return Model("default", self.branches).effect(observations)

    def alone(self, name):
        self.reused.append(name)
        model = Model(name, self.branches)
        # A shift that all actions share is no effect.
        return lambda observations: 5.0 + model.effect(observations)[None], 3.0


@pytest.fixture
def reused():
    """Names of the candidates of the default model that were used so far."""
    return []


@pytest.fixture
def fitted(reused, monkeypatch):
    """Names and numbers of states of the fits made so far, with made-up models in this process."""
    fits = []

    def fit(name, branches, protocol):
        fits.append((name, len(branches)))
        return Default(branches, reused) if name == "default" else Model(name, branches)

    def run(work_fn, tasks, cores, started_fn, inherited):
        for task in tasks:
            try:
                work_fn(task)
            except RuntimeError as error:
                yield task, str(error)
            else:
                yield task, None

    monkeypatch.setattr(worlds, "fit_model", fit)
    monkeypatch.setattr(runner, "run_side_by_side", run)
    return fits


RUN = ["reproduce", "--study", "worlds", "--preset", "smoke", "--out"]


def test_a_row_per_model_and_candidates_of_the_default_are_not_fitted_again(
    fitted, reused, tmp_path
):
    rows = worlds.study_world("clock", states=128, protocol=PRESETS["smoke"], directory=tmp_path)
    assert [row["candidate"] for row in rows] == ["default", "constant", "ridge", "direct", "paper"]
    assert fitted == [("default", 128), ("paper", 128)]
    assert reused == ["constant", "ridge", "direct"]
    default, constant, ridge, direct, paper = rows
    for key in ("own_error", "own_error_se", "pooled_error", "pooled_error_se"):
        assert direct[key] == pytest.approx(default[key])
    assert (direct["difference"], direct["within"]) == (pytest.approx(0, abs=1e-12), 1)
    assert constant["seconds"] == ridge["seconds"] == direct["seconds"] == 3
    assert default["seconds"] > 0
    assert paper["seconds"] > 0
    assert constant["own_error"] == pytest.approx(1.0)
    assert constant["difference"] == pytest.approx(default["own_error"] - 1)
    assert ridge["own_error"] < default["own_error"]  # so another candidate should have been chosen
    assert ridge["difference"] > ridge["allowance"]
    assert (ridge["within"], constant["within"]) == (0, 1)
    assert (ridge["selection_error"], ridge["selection_seconds"]) == (0.2, 2.0)
    assert (paper["selection_error"], paper["selection_seconds"]) == (None, None)
    assert (default["features"], default["moved"], default["chosen"]) == (3, 1, "direct")


def test_a_candidate_that_learned_from_cleaned_labels_is_fitted_again(
    fitted, reused, tmp_path, monkeypatch
):
    """Alone, it would not have had them; ridge was fitted before labels were cleaned, too."""
    cleaned = tuple(Candidate(f"{name} on cleaned labels", 0.1) for name in ("ridge", "direct"))
    stack = Candidate("stack", 0.1)
    monkeypatch.setitem(globals(), "ROWS", (*ROWS[:2], *cleaned, ROWS[3], stack))
    rows = worlds.study_world("clock", states=128, protocol=PRESETS["smoke"], directory=tmp_path)
    assert [row["candidate"] for row in rows] == ["default", "constant", "ridge", "direct", "paper"]
    assert fitted == [("default", 128), ("direct", 128), ("paper", 128)]
    assert reused == ["constant", "ridge"]


def test_the_best_error_and_the_paired_difference_make_the_allowance(fitted, tmp_path):
    protocol = replace(PRESETS["smoke"], test_states=200)
    rows = worlds.study_world("clock", states=128, protocol=protocol, directory=tmp_path)
    best = min(row["own_error"] for row in rows)
    for row in rows:
        expected = max(0.05 * best, 2 * row["difference_se"], 0.001)
        assert row["allowance"] == pytest.approx(expected)
    unpaired = math.hypot(rows[0]["own_error_se"], rows[2]["own_error_se"])
    assert 0 < rows[2]["difference_se"] < unpaired


def test_a_prediction_that_overflows_has_no_error(fitted, tmp_path, monkeypatch):
    monkeypatch.setitem(SHARES, "paper", math.inf)
    rows = worlds.study_world("clock", states=128, protocol=PRESETS["smoke"], directory=tmp_path)
    paper = rows[4]
    assert (paper["own_error"], paper["pooled_error"], paper["difference"]) == (None, None, None)
    assert paper["within"] == 1
    monkeypatch.setitem(SHARES, "default", math.nan)
    rows = worlds.study_world("clock", states=128, protocol=PRESETS["smoke"], directory=tmp_path)
    assert {row["within"] for row in rows} == {0}


def test_the_study_is_resumed_and_refuses_other_settings(fitted, tmp_path, capsys):
    assert main([*RUN, str(tmp_path), "--worlds", "random-100"]) == 0
    assert {num for _, num in fitted} == {64}
    fitted.clear()
    assert main([*RUN, str(tmp_path)]) == 0
    assert {num for _, num in fitted} == {128}
    text = (tmp_path / "worlds.csv").read_bytes()
    rows = list(csv.DictReader(text.decode().splitlines()))
    assert list(rows[0]) == list(COLUMNS["worlds.csv"])
    assert [row["world"] for row in rows] == ["clock"] * 5 + ["random-100"] * 5
    branches = tmp_path / "worlds" / "branches"
    assert {path.name for path in branches.iterdir()} == {"clock", "random-100"}
    assert {path.name for path in (branches / "clock").iterdir()} == {"test", "training-128"}

    fitted.clear()
    (tmp_path / "worlds.csv").unlink()
    assert main([*RUN, str(tmp_path)]) == 0
    assert fitted == []
    assert (tmp_path / "worlds.csv").read_bytes() == text
    record = tmp_path / "worlds" / "clock-128.json"
    record.write_text(record.read_text().replace('"ridge"', '"bridge"'))
    capsys.readouterr()
    assert main([*RUN, str(tmp_path)]) == 0
    assert "running world clock, states 128 again" in capsys.readouterr().err
    assert {num for _, num in fitted} == {128}
    assert main(["report", str(tmp_path)]) == 0

    quick = ["--preset", "quick", "--worlds", "clock"]
    assert main([*RUN, str(tmp_path), *quick]) == 2
    assert "holds a run with different settings" in capsys.readouterr().err


def test_a_job_that_fails_is_kept_and_shown(fitted, tmp_path, monkeypatch):
    whole = worlds.study_world

    def sometimes(world, **settings):
        if world == "clock":
            raise RuntimeError("no memory")
        return whole(world, **settings)

    monkeypatch.setattr(worlds, "study_world", sometimes)
    study = WorldsStudy(PRESETS["smoke"])
    outcome = runner.run_study(study, tmp_path, show_progress=False)
    assert outcome.problems == ["world clock, states 128: no memory"]
    text = report.write(tmp_path)
    assert "1 job missing (not run yet, or failed): 128 states (clock)" in text
    page = (tmp_path / "report.html").read_text()
    assert "<td>clock</td><td></td><td>128 states</td><td>no memory</td>" in page
    assert "1 job failed" in page
    assert studies.made_by_other_code(tmp_path) == []


def test_records_of_another_world_are_not_used(fitted, tmp_path):
    study = WorldsStudy(PRESETS["smoke"])
    runner.run_study(study, tmp_path, show_progress=False)
    path = tmp_path / "worlds" / "clock-128.json"
    content = storage.read_json(path)
    del content["seal"]
    content["rows"][0]["world"] = "shop"
    storage.write_sealed(path, content)
    (tmp_path / "worlds" / "notes.json").write_text("{}")
    found = {str(record.path.name): record for record in review(study, tmp_path)}
    assert "rows of another world or number of states" in found["clock-128.json"].problem
    assert "is not named after a job" in found["notes.json"].problem
    assert found["random-100-64.json"].status == "done"


def test_small_sizes_and_cheap_worlds_come_first():
    jobs = [(job["world"], job["states"]) for job in WorldsStudy(WorldsProtocol()).jobs()]
    assert len(jobs) == 2 * 24 + 40 + 3
    assert jobs[0] == ("linear-gain", 2_000)
    assert [num for _, num in jobs] == [2_000] * 24 + [4_000] * 3 + [5_000] * 40 + [20_000] * 24
    assert {world for world, num in jobs if num == 5_000} == {
        f"random-{i}" for i in range(100, 140)
    }
    assert jobs[23] == ("HalfCheetah-v5", 2_000)
    assert jobs[24] == ("reacher-easy+64@state", 4_000)


@pytest.mark.parametrize("name", WORLDS)
def test_every_world_of_the_full_study_can_be_loaded(name):
    world, _ = zoo.load(name, seed=7)
    assert len(world.candidate_actions) > 1


def test_results_stand_in_the_order_of_the_study():
    study = WorldsStudy(WorldsProtocol())
    names = ["linear-gain", "Pendulum-v1", "CartPole-v1", "random-9", "random-100"]
    jobs = [{"world": name, "states": num} for name in names for num in (2_000, 20_000)]
    assert sorted(reversed(jobs), key=study.place) == jobs


def test_names_with_slashes_have_files(tmp_path):
    study, job = WorldsStudy(WorldsProtocol()), {"world": "ALE/Pong-v5", "states": 64}
    path = study.record_file(tmp_path, job)
    assert path.parent == tmp_path / "worlds"
    storage.write_json(path, {})
    assert study.record_files(tmp_path) == {path: job}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--methods", "cqm"], "--study worlds has its own worlds, models and seed; leave out"),
        (["--seeds", "8"], "leave out --seeds"),
        (["--worlds", "atlantis"], "unknown world 'atlantis'"),
        (["--states", "3"], "unknown numbers of states [3]; available: [64, 128]"),
    ],
)
def test_unknown_options_are_refused(tmp_path, capsys, options, message):
    assert main([*RUN, str(tmp_path / "run"), *options]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_other_studies_have_no_worlds(tmp_path, capsys):
    assert main(["reproduce", "--worlds", "clock", "--out", str(tmp_path / "run")]) == 2
    assert "--study paper has no such option; leave out --worlds" in capsys.readouterr().err


def test_sizes_can_be_chosen():
    protocol = WorldsProtocol().restricted(["clock", "random-0", "clock"], [2_000])
    assert WorldsStudy(protocol).jobs() == [{"world": "clock", "states": 2_000}]
    protocol = WorldsProtocol().restricted(["clock", "reacher-easy+64@state"], [4_000])
    assert WorldsStudy(protocol).jobs() == [{"world": "reacher-easy+64@state", "states": 4_000}]


def test_candidates_of_the_default_are_what_they_are_alone_bit_for_bit(tmp_path, monkeypatch):
    protocol = replace(PRESETS["smoke"], updates=2, horizon=3, test_states=8)
    fit, models = worlds.fit_model, {}

    def fit_and_keep(name, branches, protocol):
        models[name] = fit("constant" if name == "paper" else name, branches, protocol)
        return models[name]

    monkeypatch.setattr(worlds, "fit_model", fit_and_keep)
    rows = worlds.study_world("clock", states=64, protocol=protocol, directory=tmp_path)
    assert list(models) == ["default", "paper"]
    errors = {row["candidate"]: row["own_error"] for row in rows}
    assert list(errors) == ["default", "constant", "ridge", "unrolled", "direct", "paper"]
    assert errors[models["default"].method_] == errors["default"]
    branches, test = (cqm.Branches.open(tmp_path / name) for name in ("training-64", "test"))
    for name in ("constant", "ridge", "unrolled", "direct"):
        predictor, seconds = models["default"].alone(name)
        assert seconds > 0
        alone = fit(name, branches, protocol).effect(test.observations)
        found = center(predictor(test.observations)).mean(axis=0)
        np.testing.assert_array_equal(found, alone)
