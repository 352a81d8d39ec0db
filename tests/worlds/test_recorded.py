"""Recorded tasks: their observations, states and failures are those of the task's own code."""

import numpy as np
import pytest
from dm_control import suite

from cqm.worlds.contract import Status, take
from cqm.worlds.recorded import RECORDED
from cqm.worlds.suite import DOMAINS, load_task, task_names


def make_environment(name):
    return suite.load(*name.split("-", 1), task_kwargs={"random": 0})


def flat(timestep):
    return np.concatenate([np.ravel(value) for value in timestep.observation.values()])


def no_noise(num, horizon):
    return np.empty((num, horizon, 0))


def random_controls(world, num, horizon, rng):
    return rng.uniform(
        world.control_low, world.control_high, (num, horizon, len(world.control_low))
    )


def test_recorded_tasks_are_tasks_without_vectorised_initial_states():
    assert len(RECORDED) == 13
    assert set(RECORDED) <= set(task_names()) - set(DOMAINS)


@pytest.mark.parametrize("name", RECORDED)
def test_recorded_observations_are_those_of_the_environment(name):
    """Bit for bit, after warm-up steps of different numbers, and in contact."""
    world, environment = load_task(name), make_environment(name)
    assert world.runs_python is False
    num, most, horizon = 8, 60, 12
    states = world.reset(num, np.random.default_rng(5))
    seeds = np.random.default_rng(5).integers(2**32, size=num)
    controls = random_controls(world, num, most + horizon, np.random.default_rng(6))
    expected, contacts = np.empty((num, most + horizon, len(world.feature_names))), 0
    for i in range(num):
        environment.task.random.seed(seeds[i])
        environment.reset()
        for t in range(most + horizon):
            expected[i, t] = flat(environment.step(controls[i, t]))
            contacts += environment.physics.data.ncon
    if name in ("finger-spin", "hopper-hop"):
        assert contacts > 0
        assert (expected[:, :, -2:] > 0).any()  # the touch sensors

    rolled = world.rollout(states, controls, no_noise(num, most + horizon), final=False)
    assert rolled.status.tolist() == [Status.OK] * num
    np.testing.assert_array_equal(rolled.features, expected)
    for warmup in (1, most):
        warm = world.rollout(states, controls[:, :warmup], no_noise(num, warmup))
        np.testing.assert_array_equal(warm.features, expected[:, :warmup])
        np.testing.assert_array_equal(world.observe(warm.states), expected[:, warmup - 1])
        branch = world.rollout(
            warm.states,
            controls[:, warmup : warmup + horizon],
            no_noise(num, horizon),
            final=False,
        )
        np.testing.assert_array_equal(branch.features, expected[:, warmup : warmup + horizon])


@pytest.mark.parametrize("final", [True, False])
@pytest.mark.parametrize("horizon", [1, 3])
@pytest.mark.parametrize("name", ["finger-spin", "acrobot-swingup", "point_mass-hard"])
def test_recordings_and_the_tasks_own_code_agree_about_failures(
    name, horizon, final, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)  # where MuJoCo writes its log
    recorded = load_task(name)
    monkeypatch.setattr("cqm.worlds.suite.RECORDED", {})
    stepped = load_task(name)
    assert (recorded.runs_python, stepped.runs_python) == (False, True)
    rng = np.random.default_rng(0)
    states, noise = recorded.reset(12, rng), no_noise(12, horizon)
    # The time, then the positions; velocities come after two or three of them.
    states["integration"][1:6, 4] = [1e3, 1e8, 1e12, np.inf, np.nan]
    states["integration"][6:8, 1] = [1e11, np.nan]
    controls = random_controls(recorded, 12, horizon, rng)
    controls[8, 0, -1], controls[9, -1, 0] = np.nan, np.nan
    ours, theirs = (w.rollout(states, controls, noise, final=final) for w in (recorded, stepped))
    assert ours.status.tolist() == theirs.status.tolist()
    assert ours.status[[0, 11]].tolist() == [Status.OK] * 2
    assert ours.status[3:10].tolist() == [Status.DIVERGED] * 7
    np.testing.assert_array_equal(ours.features, theirs.features)
    assert list(ours.states) == (list(theirs.states) if final else [])
    for key, values in ours.states.items():
        np.testing.assert_array_equal(values, theirs.states[key])
        assert values.dtype == theirs.states[key].dtype
    # The failures leave nothing behind.
    rows = slice(11, 12)
    again = recorded.rollout(take(states, rows), controls[rows], noise[rows], final=final)
    np.testing.assert_array_equal(again.features, ours.features[rows])


def test_states_of_another_task_are_refused():
    states = load_task("acrobot-swingup").reset(2, np.random.default_rng(0))
    with pytest.raises(ValueError, match=r"must have \d+ columns .* come from another world"):
        load_task("pendulum-swingup").rollout(states, np.zeros((2, 3, 1)), no_noise(2, 3))


def test_rows_with_different_models_do_not_mix():
    """Each state's targets and actuators are its own, in whatever order rows come."""
    for name in ("point_mass-hard", "reacher-hard"):
        world, rng = load_task(name), np.random.default_rng(1)
        states, controls = world.reset(5, rng), random_controls(load_task(name), 5, 3, rng)
        apart = [
            world.rollout(take(states, rows), controls[rows], no_noise(1, 3)).features[0]
            for rows in (slice(i, i + 1) for i in range(5))
        ]
        order = np.array([3, 3, 0, 4, 4, 1, 0])
        together = world.rollout(
            take(states, order), controls[order], no_noise(len(order), 3), final=False
        )
        np.testing.assert_array_equal(together.features, np.array(apart)[order])


def test_a_batch_of_no_states_has_no_features():
    world = load_task("point_mass-hard")
    states = take(world.reset(1, np.random.default_rng(0)), slice(0, 0))
    for final in (True, False):
        rolled = world.rollout(states, np.zeros((0, 3, 2)), no_noise(0, 3), final=final)
        assert rolled.features.shape == (0, 3, 4)
        assert rolled.status.shape == (0,)
