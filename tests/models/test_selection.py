"""Scores from logs alone, the directions behind them, and the study that checks both."""

from dataclasses import replace

import numpy as np
import pytest
from support.synthetic_run import log_rows
from support.worlds import pendulum_world

import cqm
from cqm.cli import main
from cqm.experiments.report.page import render
from cqm.experiments.results import load
from cqm.experiments.studies import logs as logs_study
from cqm.logs.dataset import Logs
from cqm.models.residual import ResidualModel
from cqm.models.ridge import fold_numbers, inverse_root, ridge, shrunk_covariance
from cqm.models.selection import held_out_scores
from cqm.models.subspace import visible_log_directions
from cqm.worlds.nuisance import Nuisance, NuisanceWorld


@pytest.fixture(scope="module")
def world():
    return NuisanceWorld(pendulum_world(), Nuisance(dimension=8, seed=1))


@pytest.fixture(scope="module")
def logs(world):
    branches = cqm.collect(world, states=5000, horizon=4, warmup=(0, 0), per_step=True, seed=1)
    return Logs.from_branches(branches, rng=np.random.default_rng(0))


def test_better_estimators_score_better(logs):
    train, held_out = logs.split(2000)
    models = {
        "good": ResidualModel().fit(train),
        "poor": ResidualModel(outcome="additive").fit(train[:600]),
        "opposite": ResidualModel().fit(train),
    }
    opposite = models["opposite"].predictor_
    object.__setattr__(opposite, "weights", -opposite.weights)
    scores = held_out_scores(models, held_out)
    for kind in ("r_score", "dr_score"):
        good, poor, wrong = (getattr(scores[name], kind) for name in models)
        assert good > poor > 0 > wrong
    assert scores["good"].r_score > 5 * scores["good"].r_error


def test_visible_directions_are_the_native_ones(logs, world):
    basis = visible_log_directions(logs).measures
    native = world.feature_mixing[:, 8:]
    assert 2 <= basis.shape[1] <= 3  # angle and speed, and the gain, which is predicted perfectly
    np.testing.assert_allclose(np.linalg.norm(native.T @ basis, axis=0), 1, atol=1e-2)
    np.testing.assert_allclose(basis.T @ basis, np.eye(basis.shape[1]), atol=1e-12)


def test_a_cross_fitted_ridge_predicts_new_rows_and_not_its_own_noise():
    rng = np.random.default_rng(0)
    design = rng.normal(size=(400, 20))
    weights = rng.normal(size=(20, 1))
    targets = np.concatenate([design @ weights, rng.normal(size=(400, 1))], axis=1)
    folds = fold_numbers(400, 5)
    fitted = ridge(design, targets, folds)
    np.testing.assert_allclose(fitted.weights[:, :1], weights, atol=1e-3)
    assert abs(np.corrcoef(fitted.predictions[:, 1], targets[:, 1])[0, 1]) < 0.2
    by_hand = np.einsum("nr,nro->no", design, fitted.by_fold[folds])
    np.testing.assert_allclose(fitted.predictions, by_hand, atol=1e-9)


def test_folds_are_even_keep_groups_together_and_follow_no_rhythm():
    folds = fold_numbers(400, 5)
    assert np.bincount(folds).tolist() == [80] * 5
    for period in (2, 5):  # every fold has every phase
        assert len({*zip(folds, np.arange(400) % period, strict=True)}) == 5 * period
    groups = np.repeat(np.arange(40), 10)
    own = fold_numbers(400, 5, groups).reshape(40, 10)
    assert (own == own[:, :1]).all()
    assert np.bincount(own[:, 0]).tolist() == [8] * 5
    with pytest.raises(ValueError, match="folds must be from 2 to the 400 trajectories; got 1"):
        fold_numbers(400, 1)
    with pytest.raises(ValueError, match="to the 40 groups of trajectories; got 41"):
        fold_numbers(400, 41, groups)


class Constant:
    """Effects of two actions that are the same in every state."""

    def __init__(self, difference):
        self.difference = difference

    def effect(self, observations):
        both = np.array([-0.5, 0.5])[:, None] * self.difference
        return np.broadcast_to(both, (len(observations), 2, 1))


def test_without_known_propensities_the_truth_still_scores_best():
    rng = np.random.default_rng(0)
    states = rng.choice([-1.0, 1.0], size=(4000, 1))
    actions = (rng.random(4000) < 0.5 + 0.45 * states[:, 0]).astype(int)
    outcomes = actions + 3 * states[:, 0] + rng.normal(size=4000)
    logs = Logs.from_arrays(states, actions, outcomes[:, None, None], feature_names=["y"])
    rivals = {str(size): Constant(size) for size in (1.0, 0.2, -1.0)}
    scores = held_out_scores(rivals, logs)
    for kind in ("r_score", "dr_score"):
        right, small, opposite = (getattr(scores[name], kind) for name in rivals)
        assert right > small > 0 > opposite


def test_a_shrunk_covariance_is_right_with_much_data_and_diagonal_with_little():
    rng = np.random.default_rng(0)
    root = np.array([[2.0, 0.0], [1.5, 0.5]])
    many = rng.normal(size=(50_000, 2)) @ root.T
    np.testing.assert_allclose(shrunk_covariance(many), root @ root.T, rtol=0.05)
    few = shrunk_covariance(rng.normal(size=(10, 8)))
    off = few[~np.eye(8, dtype=bool)]
    assert np.abs(off).max() < 0.5
    back = inverse_root(root @ root.T)
    np.testing.assert_allclose(back @ back.T, np.linalg.inv(root @ root.T), rtol=1e-9)


def test_a_setting_that_fails_is_kept_and_shown(tmp_path, monkeypatch):
    def run(function, tasks, cores):
        for task in tasks:
            problem = "no memory" if task[2]["behaviour"] == "state" else None
            if problem is None:
                logs_study.write_json(
                    logs_study._record(tmp_path / "logs", task[2]),
                    {"rows": log_rows("walker-walk")},
                )
            yield task, problem

    monkeypatch.setattr(logs_study, "run_side_by_side", run)
    settings = ((0, "uniform"), (64, "state"))
    study = replace(logs_study.STUDIES["smoke"], settings=settings)
    for _ in range(2):  # tried again, and not counted twice
        problems = logs_study.reproduce_logs(
            study, tmp_path, domains=["walker-walk"], seeds=[7], show_progress=False
        )
        assert problems == ["walker-walk 64 state 7: no memory"]
    results = load(tmp_path)
    assert [f["error"] for f in results.failed] == ["no memory"]
    page = render(results)
    assert "One job failed" in page
    assert "<td>state logs, nuisance 64</td><td>no memory</td>" in page


@pytest.mark.parametrize("behaviour", ["uniform", "state"])
def test_the_study_has_a_row_for_every_estimator(behaviour):
    names = ("residual", "residual-unweighted")
    rows = logs_study.study_logs(
        "cartpole-swingup",
        nuisance=4,
        behaviour=behaviour,
        trajectories=(600, 1200),
        estimators=names,
        test_states=40,
        test_draws=8,
        held_out=800,
    )
    assert [(row["trajectories"], row["estimator"]) for row in rows] == [
        (num, name) for num in (600, 1200) for name in names
    ]
    best = rows[2]
    assert best["excess_error"] < 0.4
    assert best["excess_error"] < rows[3]["excess_error"]
    assert best["r_score"] > rows[3]["r_score"]


def test_the_study_refuses_what_it_does_not_know():
    with pytest.raises(ValueError, match="behaviour must be"):
        logs_study.study_logs("cartpole-swingup", behaviour="greedy")
    with pytest.raises(ValueError, match=r"unknown estimators \['magic'\]"):
        logs_study.study_logs("cartpole-swingup", estimators=["magic"])


def test_fit_from_logs_on_the_command_line(tmp_path, capsys):
    world = cqm.load_world("cartpole-swingup")
    branches = cqm.collect(world, states=900, horizon=4, per_step=True, seed=1)
    Logs.from_branches(branches, rng=np.random.default_rng(0)).save(tmp_path / "logs")
    fit = ["fit", str(tmp_path / "logs"), "--out", str(tmp_path / "model")]
    assert main([*fit, "--estimator", "residual"]) == 0
    assert "900 decisions" in capsys.readouterr().out
    query = ["query", str(tmp_path / "model"), "--reward=-cart_position", "--states", "3"]
    assert main(query) == 0
    assert capsys.readouterr().out.count("0 > 1 > 2") == 3
    assert main(fit) == 2
    assert "holds logs, which were never branched" in capsys.readouterr().err
    assert main(["fit", str(tmp_path), "--estimator", "hindsight", "--out", "x"]) == 2
    assert "holds no logs" in capsys.readouterr().err
