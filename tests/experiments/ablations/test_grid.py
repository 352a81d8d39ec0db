from dataclasses import replace

import pytest

from cqm.experiments.ablations import ABLATIONS, SIZES, Fit, Grid, Point, Setting, ablation_of
from cqm.experiments.methods import METHODS, method_of
from cqm.experiments.protocol import DOMAINS, preset

SMALL = Grid(preset("smoke"), (Point(Setting(), (Fit("cqm"),)),), ("reacher-easy",), (7,))


def test_labels_name_what_differs_from_the_protocol():
    assert Setting(horizon=5, discount=0.9).label == "horizon=5,discount=0.9"
    assert Fit("cqm", rank=4).label == "cqm,rank=4"
    assert Fit("cqm", "effect").full_name == "cqm+effect"
    assert Fit("cqm+effect").full_name == "cqm+effect"


def test_a_setting_changes_the_protocol_only_where_it_has_values():
    protocol = preset("smoke")
    assert Setting(amplitude=50.0).applied(protocol) == protocol
    changed = Setting(horizon=5, nuisance=0).applied(protocol)
    assert (changed.horizon, changed.nuisance, changed.states) == (5, 0, protocol.states)


def test_a_grid_is_restricted_to_its_own_domains_and_to_any_seeds():
    grid = replace(SMALL, domains=DOMAINS).restricted(["walker-walk"], [3, 3, 1])
    assert (grid.domains, grid.seeds) == (("walker-walk",), (3, 1))
    assert SMALL.restricted() == SMALL
    with pytest.raises(ValueError, match=r"no domains \['walker-walk'\]; available: \['reacher"):
        SMALL.restricted(["walker-walk"])
    with pytest.raises(ValueError, match=r"seeds must be one or more integers from 0 up; got \[\]"):
        SMALL.restricted(seeds=[])


def test_points_are_found_by_their_label():
    assert SMALL.point("protocol") == SMALL.points[0]
    with pytest.raises(ValueError, match=r"no point 'rank=3'; available: \['protocol'\]"):
        SMALL.point("rank=3")


def test_unknown_names_and_sizes_are_explained():
    with pytest.raises(
        ValueError, match=r"unknown ablation 'horizons'; did you mean \['horizon'\]"
    ):
        ablation_of("horizons")
    with pytest.raises(ValueError, match=r"unknown preset 'paper'; available: \['quick', 'full'"):
        ablation_of("rank").grid("paper")


@pytest.mark.parametrize("name", ABLATIONS)
def test_declarations_are_sound(name):
    ablation = ABLATIONS[name]
    assert tuple(sorted(ablation.grids)) == tuple(sorted(SIZES))
    assert callable(ablation.measure_fn)
    assert ablation.question.endswith("?")
    for size in SIZES:
        grid = ablation.grid(size)
        assert grid.protocol.preset == size
        labels = [point.setting.label for point in grid.points]
        assert len(set(labels)) == len(labels), size
        for point in grid.points:
            fits = [fit.label for fit in point.fits]
            assert len(set(fits)) == len(fits), size
            for fit in point.fits:
                assert fit.method == "unrolled" or method_of(fit.full_name)
        assert len(grid.seeds) >= (3 if size == "full" else 1)
        assert set(grid.domains) <= set(DOMAINS)
    for chart in ablation.charts:
        assert chart.x in ablation.axes
        bases = {method.partition("+")[0] for method in chart.methods}
        assert bases <= {*METHODS, "subspace", "targets", "exact"}
