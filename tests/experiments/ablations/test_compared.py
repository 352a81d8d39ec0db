import numpy as np
import pytest

import cqm
from cqm.experiments.ablations.compared import GRAPHS, arms_of, gains


def test_an_unknown_graph_is_explained():
    with pytest.raises(ValueError, match=r"unknown comparison graph 'ring'; available: \['full'"):
        arms_of("ring", 3)


@pytest.mark.parametrize("graph", GRAPHS)
def test_every_graph_can_be_collected(graph):
    branches = cqm.collect(
        cqm.load_world("cartpole-swingup"), states=8, horizon=2, arms=arms_of(graph, 3)
    )
    assert branches.num_arms == (3 if graph == "full" else 2)
    if graph == "star":
        assert np.all(branches.arms[:, 0] == 0)


def test_the_gain_of_the_best_action():
    assert gains(np.array([[[1.0, 2.0, 3.0]]])).tolist() == [[1.0]]
