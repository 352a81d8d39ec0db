import pickle
import threading

import cloudpickle
import numpy as np
import pytest
from support.worlds import ToyWorld

from cqm.worlds.contract import PerThread, World, concatenate, num_states, take
from cqm.worlds.loading import load_world


def test_taken_rows_are_clones():
    states = {"x": np.array([1.0, 2.0, 3.0]), "y": np.arange(6).reshape(3, 2)}
    clones = take(states, np.array([2, 0, 2]))
    assert num_states(clones) == 3
    assert clones["x"].tolist() == [3.0, 1.0, 3.0]
    assert clones["y"].tolist() == [[4, 5], [0, 1], [4, 5]]
    clones["x"][0] = 9.0
    assert states["x"].tolist() == [1.0, 2.0, 3.0]
    assert clones["x"].tolist() == [9.0, 1.0, 3.0]


def test_batches_join_in_order():
    states = {"x": np.array([1.0, 2.0, 3.0]), "y": np.arange(6).reshape(3, 2)}
    joined = concatenate([take(states, np.array([2])), take(states, slice(0, 2))])
    assert joined["x"].tolist() == [3.0, 1.0, 2.0]
    assert joined["y"].tolist() == [[4, 5], [0, 1], [2, 3]]


def test_a_step_is_a_rollout_of_length_one():
    world, states = ToyWorld(), {"x": np.array([2.0, -4.0])}
    stepped = world.step(states, np.array([[1.0], [0.0]]), np.array([[0.5], [0.25]]))
    assert stepped.features.tolist() == [[[2.5, 1.0]], [[-1.75, 0.0]]]
    assert stepped.states["x"].tolist() == [2.5, -1.75]
    assert states["x"].tolist() == [2.0, -4.0]


def test_worlds_without_noise_ask_for_none():
    rng = np.random.default_rng(0)
    assert World.sample_noise(ToyWorld(), 4, 7, rng).shape == (4, 7, 0)
    assert rng.random() == np.random.default_rng(0).random()


def test_each_thread_has_its_own_object():
    made = PerThread(list)
    mine = made.get()
    mine.append("mine")
    others = []
    thread = threading.Thread(target=lambda: others.append(made.get()))
    thread.start()
    thread.join()
    assert others == [[]]
    assert made.get() is mine


@pytest.mark.parametrize("library", [pickle, cloudpickle])
def test_a_sent_copy_starts_empty(library):
    made = PerThread(list)
    made.get().append("mine")
    copy = pickle.loads(library.dumps(made))
    assert copy.get() == []
    assert made.get() == ["mine"]


def test_a_closure_travels_with_cloudpickle():
    start = ["given"]
    made = PerThread(lambda: list(start))
    made.get().append("mine")
    assert pickle.loads(cloudpickle.dumps(made)).get() == ["given"]


def test_a_used_world_rolls_out_the_same_after_pickling():
    world = load_world("reacher-easy", nuisance=3, seed=1)
    rng = np.random.default_rng(0)
    states, noise = world.reset(4, rng), world.sample_noise(4, 3, rng)
    controls = world.candidate_actions[rng.integers(5, size=(4, 3))]
    expected = world.rollout(states, controls, noise).features
    copy = pickle.loads(cloudpickle.dumps(world))
    np.testing.assert_array_equal(copy.rollout(states, controls, noise).features, expected)
    assert copy.identity() == world.identity()


def test_actions_without_names_are_numbered():
    world = ToyWorld()
    assert world.action_names == ("0", "1", "2")
    assert "3 actions, " in repr(world)


def test_a_world_shows_its_observations_actions_and_cloning():
    named = type("Named", (ToyWorld,), {"action_names": ("left", "<wait>", "right")})()
    assert repr(named) == (
        "Named(toy, 1 observation (x), 3 actions (left, <wait>, right), cloning: copy)"
    )
    html = named._repr_html_()
    assert "<th>3 actions</th><td>left [-1.0], &lt;wait&gt; [0.0], right [1.0]</td>" in html
    assert "<th>2 features</th><td>x, u</td>" in html


def test_a_world_that_is_not_complete_has_a_repr():
    class Unfinished(ToyWorld):
        @property
        def candidate_actions(self):
            raise AttributeError("not yet")

    assert "Unfinished object at" in repr(Unfinished())
