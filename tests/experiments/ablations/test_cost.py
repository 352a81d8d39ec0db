from dataclasses import replace

import pytest

from cqm.experiments.ablations import ABLATIONS
from cqm.experiments.ablations.cost import MILLISECONDS, STEPS_PER_SECOND, seconds
from cqm.experiments.methods import METHODS
from cqm.experiments.protocol import DOMAINS

HOUR = 3600.0


def test_rates_are_known_for_all_domains_and_for_known_methods():
    assert tuple(STEPS_PER_SECOND) == DOMAINS
    assert set(MILLISECONDS) <= {*METHODS, "unrolled"}


def test_full_runs_take_at_most_a_day_on_two_cores():
    full = sum(seconds(each, each.grids["full"]) for each in ABLATIONS.values())
    assert full <= 24 * HOUR


@pytest.mark.parametrize("name", ABLATIONS)
def test_quick_runs_take_less_than_half_an_hour(name):
    ablation = ABLATIONS[name]
    assert seconds(ablation, ablation.grids["quick"]) < HOUR / 2
    assert seconds(ablation, ablation.grids["smoke"]) < 120
    assert seconds(ablation, ablation.grids["full"]) > seconds(ablation, ablation.grids["quick"])


def test_time_grows_with_seeds_and_falls_with_cores():
    ablation = ABLATIONS["rank"]
    grid = ablation.grids["full"]
    assert seconds(ablation, grid, cores=1) == pytest.approx(2 * seconds(ablation, grid))
    one = replace(grid, seeds=(7,))
    assert seconds(ablation, one) == pytest.approx(seconds(ablation, grid) / 3)
