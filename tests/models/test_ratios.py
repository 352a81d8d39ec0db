"""Density ratios: logs of any size, calibration of the classifier, and clipped ratios."""

import numpy as np
import pytest
from support.kills import stopped_at

from cqm.logs.dataset import Logs
from cqm.logs.shards import LogWriter
from cqm.models.hindsight import HindsightModel
from cqm.models.ratios import Reliability
from cqm.models.training import Training

pytestmark = pytest.mark.filterwarnings("ignore:effects are set to zero")  # in the second feature
QUICK = {
    "width": 16,
    "members": 2,
    "training": Training(updates=60, batch_size=64, learning_rate=1e-2, chunk=20),
}


def recorded(num=3000, *, least=0.3, groups=None, known=True):
    """The first of two features grows with the action, more so in some states."""
    rng = np.random.default_rng(0)
    states = rng.normal(size=(num, 3))
    share = np.clip(1 / (1 + np.exp(-states[:, 1])), least, 1 - least)
    actions = (rng.random(num) < share).astype(int)
    later = rng.integers(2, size=(num, 1))
    features = rng.normal(size=(num, 2, 2)) + states[:, None, :2]
    features[..., 0] += ((1 + states[:, 0]) * actions)[:, None]
    return Logs.from_arrays(
        states,
        np.column_stack([actions, later]),
        features,
        num_actions=2,
        propensities=np.stack([1 - share, share], axis=1) if known else None,
        groups=groups,
    )


def sharded(logs, directory):
    with LogWriter(directory, shard_rows=700) as writer:
        writer.append(logs)
    return Logs.open(directory)


@pytest.fixture
def small_blocks(monkeypatch):
    monkeypatch.setattr("cqm.rows.BLOCK_ROWS", 500)


@pytest.mark.parametrize("memory_gb", [2.0, 2e-5])
@pytest.mark.parametrize("groups", [None, np.arange(3000) // 3])
def test_logs_in_shards_give_the_same_bits(memory_gb, groups, tmp_path, small_blocks):
    logs = recorded(groups=groups, known=groups is None)
    states, spread = logs.observations[:20], lambda features: features[..., 0] ** 2
    one, other = (
        HindsightModel(memory_gb=memory_gb, **QUICK).fit(each)
        for each in (logs, sharded(logs, tmp_path))
    )
    np.testing.assert_array_equal(one.effect(states), other.effect(states))
    np.testing.assert_array_equal(
        one.reward_advantage(states, spread), other.reward_advantage(states, spread)
    )
    whole = HindsightModel(**QUICK).fit(logs)
    assert np.array_equal(whole.effect(states), one.effect(states)) == (memory_gb == 2.0)


def test_a_fit_that_is_stopped_anywhere_ends_with_the_same_bits(tmp_path, small_blocks):
    logs = sharded(recorded(), tmp_path / "logs")

    def fit(directory):
        model = HindsightModel(memory_gb=2e-5, **QUICK)
        return model.fit(logs, directory=directory, show_progress=False)

    whole = fit(tmp_path / "whole").effect(logs.read("observations", 0, 50))
    points = 0
    for point in range(1, 200, 3):
        directory = tmp_path / str(point)
        if not stopped_at(point, lambda to=directory: fit(to)):
            break
        points += 1
        found = fit(directory).effect(logs.read("observations", 0, 50))
        np.testing.assert_array_equal(found, whole)
        assert not list(directory.glob("*.sums.safetensors"))
    assert points > 8


def test_the_reliability_of_a_classifier_is_measured_where_it_did_not_learn():
    model = HindsightModel(**QUICK).fit(recorded())
    found = model.reliability_
    assert found.shares.sum() == pytest.approx(1)
    assert found.error < 0.05
    assert "its probabilities differ from frequencies by 0.0" in model.summary()
    # A classifier that learned the noise is too sure, and its temperature makes up for it.
    much = Training(updates=1500, batch_size=64, learning_rate=1e-2)
    sure = HindsightModel(width=64, members=1, training=much).fit(recorded(400))
    assert sure.reliability_.error < 0.15
    assert "at temperatures [0" not in sure.summary()


def test_the_error_of_a_reliability_is_the_mean_difference():
    found = Reliability(
        np.array([0.1, np.nan, 0.8]), np.array([0.2, np.nan, 0.6]), np.array([0.75, 0.0, 0.25])
    )
    assert found.error == pytest.approx(0.125)


def test_clipped_ratios_are_biased_and_the_correction_sees_it():
    logs = recorded(6000, least=0.05)
    states = np.array([[1.0, -3.0, 0.0], [1.0, 3.0, 0.0]])  # where one of the actions is rare

    def found(**options):
        model = HindsightModel(**QUICK, **options).fit(logs)
        return model.effect(states, action=1, baseline=0)[:, 0].mean(), model.summary()

    clipped, text = found(largest_ratio=1.5, corrected=False)
    assert "of the density ratios exceeded 1.5 and were clipped, by" in text
    assert clipped < 0.7 * found(corrected=False)[0]
    assert clipped + 0.3 < found(largest_ratio=1.5)[0] < 3.9  # the truth


def test_limits_of_the_ratio_are_checked():
    for given, message in (
        ({"largest_ratio": 1.0}, "largest_ratio must be a number above 1"),
        ({"largest_ratio": 2.0, "method": "tabular"}, "largest_ratio is for method='network'"),
        ({"memory_gb": 0}, "memory_gb must be a number above 0"),
    ):
        with pytest.raises(ValueError, match=message):
            HindsightModel(**given).fit(recorded(100))
