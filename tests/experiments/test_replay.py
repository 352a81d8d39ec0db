"""Replay sets: their decisions, the states that they visit, and the study of them."""

import numpy as np
import pytest

import cqm
from cqm.cli import main
from cqm.experiments.replay import mixed_behaviour, record_replay, visited_states
from cqm.experiments.results import load
from cqm.experiments.studies.logs import REPLAY, study_logs
from cqm.experiments.zoo import state_behaviour
from cqm.worlds.contract import take


@pytest.fixture(scope="module", params=[0, 3])
def world(request):
    return cqm.load_world("reacher-easy", nuisance=request.param, seed=7)


def recorded(world, directory, decisions=3000):
    settings = {"horizon": 4, "discount": 0.9, "steps": 20, "seed": 1}
    return record_replay(world, directory, decisions=decisions, **settings)


def test_three_policies_take_turns(world):
    seen = world.observe(world.reset(50, np.random.default_rng(0)))
    others = [state_behaviour(world, seed)(seen) for seed in (0, 1)]
    np.testing.assert_allclose(mixed_behaviour(world)(seen), (0.2 + sum(others)) / 3)
    assert not np.allclose(*others)


def test_every_step_of_an_episode_is_a_decision(world, tmp_path):
    logs = recorded(world, tmp_path)
    assert (len(logs), logs.recipe.continuation.law) == (3000, "mixed")
    loaded = logs.load()
    assert np.bincount(loaded.groups)[:-1].tolist() == [17] * 176
    # The next decision of an episode sees what the features say.
    same = np.diff(loaded.groups) == 0
    np.testing.assert_array_equal(loaded.features[:-1, 0][same], loaded.observations[1:][same])
    np.testing.assert_allclose(loaded.propensities, mixed_behaviour(world)(loaded.observations))
    assert recorded(world, tmp_path).digest() == logs.digest()
    assert not logs.coverage().problems


def test_branches_start_where_the_replay_set_goes(world, tmp_path):
    visited = visited_states(world, 16)
    states = visited.reset(2000, np.random.default_rng(0))
    seen = visited.native_observations(visited.observe(states))
    logged = world.native_observations(recorded(world, tmp_path).load().observations)
    np.testing.assert_allclose(seen.mean(axis=0), logged.mean(axis=0), atol=0.2)
    np.testing.assert_allclose(seen.std(axis=0), logged.std(axis=0), rtol=0.25)
    still = visited_states(world, 0).reset(2000, np.random.default_rng(0))
    assert visited.native_observations(visited.observe(still))[:, -2:].std() < seen[:, -2:].std()
    few = take(states, np.arange(3))
    controls, noise = np.zeros((3, 2, 2)), visited.sample_noise(3, 2, np.random.default_rng(0))
    np.testing.assert_array_equal(
        visited.rollout(few, controls, noise).features,
        world.rollout(few, controls, noise).features,
    )
    assert visited.identity() != world.identity()


@pytest.mark.filterwarnings("ignore:poor coverage")
def test_the_study_has_a_row_per_size_and_estimator():
    given = {"behaviour": "mixed", "protocol": REPLAY["smoke"], "estimators": ["residual"]}
    rows = study_logs("reacher-easy", **given)
    assert [(row["trajectories"], row["estimator"]) for row in rows] == [
        (400, "residual"),
        (800, "residual"),
    ]
    assert rows[1]["excess_error"] < 0.6
    with pytest.raises(ValueError, match=r"unknown estimators \['branched'\]; available"):
        study_logs("reacher-easy", **{**given, "estimators": ["branched"]})


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:poor coverage")
def test_one_command_runs_the_study_and_resumes_it(tmp_path):
    run = ["reproduce", "--study", "replay", "--preset", "smoke", "--domains", "reacher-easy"]
    for _ in range(2):
        assert main([*run, "--out", str(tmp_path)]) == 0
    assert [(row["trajectories"], row["estimator"]) for row in load(tmp_path).logs] == [
        (num, name) for num in (400, 800) for name in ("residual", "steps", "hindsight")
    ]
    page = (tmp_path / "report.html").read_text()
    assert "Effects from replay sets" in page
    assert "Error against the size of a replay set" in page
