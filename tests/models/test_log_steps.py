"""Effects from single logged steps: logs of any size, and windows for training."""

import numpy as np
import pytest
from support.kills import stopped_at

from cqm.logs.dataset import Logs
from cqm.logs.shards import LogWriter
from cqm.models import subspace
from cqm.models.residual import ResidualModel
from cqm.models.training import Training

pytestmark = pytest.mark.filterwarnings("ignore:effects are set to zero")
QUICK = {
    "method": "steps",
    "width": 16,
    "draws": 4,
    "training": Training(updates=300, batch_size=64, learning_rate=5e-3, chunk=50),
}


def recorded(num=2000, *, continuation="uniform"):
    """The action pushes the first of three coordinates by 1, and half of it comes back."""
    rng = np.random.default_rng(0)
    state, actions = rng.normal(size=(num, 3)), rng.integers(2, size=(num, 3))
    start, steps = state, []
    for k in range(3):
        state = 0.5 * state + 0.01 * rng.normal(size=state.shape)
        state[:, 0] += actions[:, k]
        steps.append(state)
    return Logs.from_arrays(
        start,
        actions,
        np.stack(steps, axis=1),
        num_actions=2,
        propensities=[0.5, 0.5],
        continuation=continuation,
        features_are_next_observation=True,
    )


@pytest.fixture
def sharded(tmp_path, monkeypatch):
    monkeypatch.setattr("cqm.rows.BLOCK_ROWS", 300)
    with LogWriter(tmp_path / "logs", shard_rows=700) as writer:
        writer.append(recorded())
    return Logs.open(tmp_path / "logs")


@pytest.mark.parametrize("memory_gb", [2.0, 1e-4])
def test_logs_in_shards_give_the_same_bits(memory_gb, sharded, monkeypatch):
    monkeypatch.setattr("cqm.models.log_steps._MEMORY_GB", memory_gb)
    logs = recorded()
    one, other = (ResidualModel(**QUICK).fit(each) for each in (logs, sharded))
    found = one.effect(logs.observations[:20], action=1, baseline=0)
    np.testing.assert_array_equal(found, other.effect(logs.observations[:20], action=1, baseline=0))
    # 1, 0.95 · 0.5 and 0.95² · 0.25
    np.testing.assert_allclose(found[:, 0], 1.70, atol=0.15)
    assert np.abs(found[:, 1:]).max() < 0.1


def test_a_fit_that_is_stopped_anywhere_ends_with_the_same_bits(sharded, tmp_path):
    def fit(directory, **options):
        return ResidualModel(**QUICK, **options).fit(sharded, directory=directory)

    states = sharded.read("observations", 0, 5)
    whole, points = fit(tmp_path / "whole").effect(states), 0
    for point in range(1, 100, 4):  # checkpoints of two runs, and lines of their logs
        directory = tmp_path / str(point)
        if not stopped_at(point, lambda to=directory: fit(to)):
            break
        points += 1
        np.testing.assert_array_equal(fit(directory).effect(states), whole)
    assert points >= 2
    with pytest.raises(ValueError, match="belongs to a run with different settings or data"):
        fit(tmp_path / "whole", seed=1)


@pytest.mark.parametrize(("most", "used"), [(10**6, 3), (4000, 2), (10, 1)])
def test_of_many_trajectories_only_the_first_steps_show_directions(most, used, monkeypatch):
    monkeypatch.setattr(subspace, "_MOST_STEPS", most)
    seen = []
    find = subspace.find_subspace

    def spy(rows, **options):
        seen.append((rows.num, len(rows.head(1)["after"]), rows.shape("taken")))
        return find(rows, **options)

    monkeypatch.setattr(subspace, "find_subspace", spy)
    logs = recorded()
    found = subspace.visible_subspace(logs.rows(), logs)
    assert seen == [(2000 * used, used, (2,))]
    assert len(found) >= 1
