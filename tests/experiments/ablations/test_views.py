import math

import pytest

from cqm.experiments import published as paper
from cqm.experiments.ablations import ABLATIONS, views
from cqm.experiments.results import Results


def row(method, measure, value, domain="reacher-easy", seed=7, **axes):
    keys = {"domain": domain, "seed": seed, **axes}
    return {**keys, "method": method, "measure": measure, "value": value}


def nuisance(size, own, world=1.0, **keys):
    at = {"nuisance": float(size), "amplitude": 6.0, **keys}
    return [
        row("cqm+project", "excess_error", own, **at),
        row("world", "excess_error", world, **at),
    ]


def results(**ablations):
    return Results({}, [], ablations=ablations)


def test_nothing_without_ablations():
    assert views.figures(results()) == []
    assert views.tables(results()) == []
    assert views.verdict(results()) == ""


def test_the_verdict_on_the_nuisance_follows_the_rule():
    flat = [*nuisance(0, 0.010), *nuisance(512, 0.0119)]
    assert "within 10% or 0.002 of that without a nuisance on Reacher (0.0100 and 0.0119)" in (
        views.verdict(results(nuisance=flat))
    )
    steep = [*nuisance(0, 0.100), *nuisance(512, 0.111)]
    said = views.verdict(results(nuisance=steep))
    assert said == (
        "With a nuisance of 512 dimensions, the excess error of CQM-B with projected input is "
        "more than 10% and 0.002 higher than without one on Reacher (0.1000 and 0.1110)."
    )


def test_the_verdict_on_the_coupling_names_the_largest_gap():
    rows = []
    for noise, measured in ((0.0, 102.0), (1.0, 49.0)):
        at = {"noise": noise, "later": noise}
        rows.append(row("targets", "variance", measured, **at))
        rows.append(row("targets", "predicted", 100.0 if noise == 0 else 50.0, **at))
        rows.append(row("targets", "variance_own", 1.04, **at))
        rows.append(row("targets", "predicted_own", 1.0, **at))
    assert views.verdict(results(coupling=rows)) == (
        "The measured variance of target differences is within 2.0% of the paired-variance "
        "proposition at every coupling, and the part without the nuisance within 4.0%."
    )


def test_charts_are_described_by_their_ends():
    rows = [*nuisance(0, 0.01, 0.5), *nuisance(64, 0.02, 0.9), *nuisance(512, 0.03, 1.0)]
    chart = ABLATIONS["nuisance"].charts[0]
    assert views.described(ABLATIONS["nuisance"], chart, rows) == (
        "Excess error, first to last nuisance. "
        "Reacher: CQM-B + project 0.0100 to 0.0300, World 0.5000 to 1.0000."
    )


def test_means_over_seeds_at_a_place():
    rows = [*nuisance(0, 0.1), *nuisance(0, 0.3, seed=8)]
    found = views.mean(rows, "reacher-easy", "cqm+project", "excess_error", nuisance=0)
    assert found == pytest.approx(0.2)
    assert math.isnan(views.mean(rows, "reacher-easy", "cqm", "excess_error", nuisance=0))


def test_published_accuracies_are_compared_with_the_range_of_draws():
    published = paper.ACCURACY["reacher-easy", "cqm"].value
    rows = [
        row("cqm", "accuracy", published + shift, prototypes=num)
        for num, shift in ((1.0, 0.01), (2.0, -0.2))
    ]
    rows += [row("direct", "accuracy", 0.1 * num, prototypes=num) for num in (1.0, 2.0)]
    said = views.verdict(results(prototypes=rows))
    assert said.startswith("1 of 2 published accuracies lie, with their intervals,")
    (drawn,) = views.figures(results(prototypes=rows))
    assert drawn.name == "ablation-prototypes"
    assert "Direct value" in drawn.svg


def data():
    errors = {"cqm": 0.5, "cqm+effect": 0.2, "cqm-full-rank": 0.4, "cqm-full-rank+effect": 0.1}
    rows = [
        row(method, "excess_error", error * share, states=states, draws=1.0)
        for method, error in errors.items()
        for states, share in ((100.0, 1.0), (500.0, 0.5))
    ]
    return [*rows, row("limit", "noise_floor", 0.25, states=math.nan, draws=1.0)]


def test_parts_of_the_error_have_a_table_and_a_figure():
    (table,) = views.tables(results(data=data()))
    assert table.header[0] == "Domain"
    (line,) = table.rows
    values = [cell.value for cell in line[1:]]
    assert values[-1] == pytest.approx(0.25 + 0.75 * 0.5)
    assert math.fsum(values[:-1]) == pytest.approx(values[-1])
    names = [picture.name for picture in views.figures(results(data=data()))]
    assert names == ["ablation-data", "ablation-attribution"]
    assert "label noise 0.2500" in views.verdict(results(data=data()))
