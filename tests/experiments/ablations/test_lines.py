import math
from dataclasses import replace

import pytest

from cqm.experiments.ablations import ABLATIONS, Chart
from cqm.experiments.ablations.lines import curves, limits, line_title, picture


def rows(domain="reacher-easy", seeds=(7, 8, 9)):
    found = []
    for seed in seeds:
        for rank in (1.0, 8.0):
            for method, error in (("cqm", 0.5), ("world", 0.9)):
                value = error / rank + 0.01 * (seed - 8)
                found.append(row(domain, seed, rank, method, "excess_error", value))
        found.append(row(domain, seed, math.nan, "limit", "noise_floor", 0.25))
    return found


def row(domain, seed, rank, method, measure, value):
    keys = {"domain": domain, "seed": seed, "rank": rank}
    return {**keys, "method": method, "measure": measure, "value": value}


CHART = Chart("rank", "rank", methods=("world", "cqm"), limits=("noise_floor",))


def test_curves_are_means_over_seeds_in_the_order_of_the_methods():
    found = curves(CHART, rows())
    assert list(found) == ["world", "cqm"]
    at_eight = found["cqm"][8.0]
    assert at_eight.mean == pytest.approx(0.0625)
    assert (at_eight.num, at_eight.error) == (3, pytest.approx(0.01 / 3**0.5))


def test_an_undefined_line_is_left_out():
    undefined = [{**r, "value": math.nan} if r["method"] == "cqm" else r for r in rows()]
    assert list(curves(CHART, undefined)) == ["world"]


def test_a_limit_without_a_place_holds_everywhere():
    assert limits(CHART, rows(), "reacher-easy")["noise_floor"]["everywhere"].mean == 0.25
    assert limits(CHART, rows(), "walker-walk") == {}


def test_titles_of_lines():
    assert line_title(CHART, "world+effect") == "World + effect"
    assert line_title(CHART, "subspace") == "best subspace"
    assert line_title(Chart("asked", "law", lines="continuation"), "zero") == "zero"


def test_a_short_logarithmic_axis_has_more_labels_than_powers_of_ten():
    chart = replace(CHART, y_scale="log", limits=())
    ablation = replace(ABLATIONS["rank"], charts=(chart,))
    drawn = picture(ablation, chart, rows(), "What it shows.")
    for label in ("0.1", "0.2", "0.5"):
        assert f">{label}</text>" in drawn.svg, label


def test_a_picture_has_a_panel_per_domain_and_all_lines():
    ablation = ABLATIONS["rank"]
    chart = ablation.charts[0]
    drawn = picture(ablation, chart, rows() + rows("walker-walk"), "What it shows.")
    assert drawn.name == "ablation-rank"
    assert drawn.section == "ablations"
    for text in ("Reacher", "Walker", "CQM-B", "World", "label noise", "excess error"):
        assert f">{text}</text>" in drawn.svg, text
    again = picture(ablation, chart, rows() + rows("walker-walk"), "What it shows.")
    assert drawn.svg == again.svg


def test_one_seed_has_no_band():
    ablation = ABLATIONS["rank"]
    bands = [
        picture(ablation, ablation.charts[0], rows(seeds=seeds), "").svg.count("fill-opacity: 0.18")
        for seeds in ((7,), (7, 8, 9))
    ]
    assert bands == [0, 2]


def test_nothing_is_drawn_without_rows():
    ablation = ABLATIONS["rank"]
    assert picture(ablation, ablation.charts[0], [], "") is None
