import math
import re
from dataclasses import replace
from xml.etree import ElementTree

import matplotlib
import numpy as np
import pytest
from support.synthetic_run import write_run

from cqm.experiments import figures
from cqm.experiments.methods import METHODS, Method
from cqm.experiments.results import COLUMNS, load, write_csv

DOMAINS = ("reacher-easy", "walker-walk")
NAMES = [
    *(
        f"{kind}-{domain}"
        for kind in ("score", "alignment", "regret", "curves")
        for domain in DOMAINS
    ),
    *("spectrum", "diagnosis-walker-walk"),
    *(f"ordinary-{domain}" for domain in DOMAINS),
]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return write_run(tmp_path_factory.mktemp("run"), domains=DOMAINS, seeds=(7, 8))


@pytest.fixture(scope="module")
def pictures(run):
    return {picture.name: picture for picture in figures.make_figures(load(run))}


def texts(picture):
    return [node.text for node in ElementTree.fromstring(picture.svg).iter() if node.text]


def test_every_domain_has_its_figures(pictures):
    assert list(pictures) == NAMES


def test_figures_are_the_same_every_time_whatever_the_readers_settings(run, pictures):
    before = matplotlib.rcParams["font.size"]
    with matplotlib.rc_context({"font.size": 30, "axes.facecolor": "red", "svg.hashsalt": "x"}):
        again = figures.make_figures(load(run))
    assert matplotlib.rcParams["font.size"] == before
    assert again == list(pictures.values())


def test_files_are_whole_small_and_suit_light_and_dark(pictures):
    for picture in pictures.values():
        root = ElementTree.fromstring(picture.document.partition("\n")[2])
        assert root.tag.endswith("svg")
        assert "prefers-color-scheme:dark" in picture.document
        assert "currentColor" in picture.svg
        assert "#010203" not in picture.svg  # the colour that stands for the reader's own
        assert len(picture.document) < 200_000
        addresses = re.findall(r"https?://[^\s\"]*", picture.document)
        assert addresses == ["http://www.w3.org/2000/svg"]


def test_names_within_figures_are_unique_and_found(pictures):
    page = "".join(picture.svg for picture in pictures.values())
    names = re.findall(r' id="([^"]+)"', page)
    assert len(names) == len(set(names)) > 10
    assert set(re.findall(r'(?:href="|url\()#([^")]+)', page)) == set(names)


def test_panels_show_the_correlation_and_the_papers(pictures, run):
    mean = np.mean(list(load(run).values("reacher-easy", "cqm", "correlation").values()))
    assert f"CQM-B: {mean:.3f} (0.986)" in texts(pictures["alignment-reacher-easy"])
    assert f"correlation {mean:.3f}" in pictures["alignment-reacher-easy"].caption


def test_an_undefined_correlation_is_shown_as_undefined(tmp_path):
    write_run(tmp_path, domains=("reacher-easy",), seeds=(7,), methods=("cqm", "sf"), beyond=())
    results = load(tmp_path)
    for row in results.scores:
        row["correlation"] = math.nan
    kept = [row for row in results.alignment if row["method"] == "cqm"]
    write_csv(tmp_path / "alignment.csv", kept, COLUMNS["alignment.csv"])
    write_csv(tmp_path / "scores.csv", results.scores, COLUMNS["scores.csv"])
    picture = figures.alignment_figure(load(tmp_path), "reacher-easy")
    assert "SF: undefined (0.542)" in texts(picture)
    assert picture.caption == "No correlation is defined."


def test_hexagons_hold_every_count():
    """Few hexagons, and the strongest where the counts are."""
    rows = [
        {"oracle": 0.0, "predicted": 0.0, "count": 9},
        {"oracle": 1.0, "predicted": 1.0, "count": 1},
    ]
    axes = matplotlib.figure.Figure().add_subplot()
    figures.draw_hexagons(axes, rows, 2.0)
    shapes = axes.collections[0]
    assert np.sum(shapes.get_array() ** 2) == pytest.approx(10)
    strongest = shapes.get_offsets()[np.argmax(shapes.get_array())]
    assert np.hypot(*strongest) < 0.6


def test_what_rank_eight_leaves_out(run, pictures):
    shares = 0.6 ** np.arange(24)
    outside = shares[8:].sum() / shares.sum()
    assert figures.beyond_rank(load(run), "walker-walk") == pytest.approx(outside)
    assert figures.beyond_rank(load(run), "reacher-easy") == 0  # it has six directions
    assert f"on Walker: {outside:.1%} of the energy" in pictures["spectrum"].caption
    assert "Walker, 98.3% by rank 8" in texts(pictures["spectrum"])


def test_the_diagnosis_names_noise_rank_and_conditioning(pictures):
    picture = pictures["diagnosis-walker-walk"]
    assert {"label noise", "beyond rank 8", "CQM-B", "CQM-B + effect", "Default model"} <= set(
        texts(picture)
    )
    assert "0.630" in texts(picture)
    assert "63.0% is noise" in picture.caption
    assert "the rank accounts for at most 0.017" in picture.caption


def test_curves_are_means_over_seeds_thinned_to_their_ends():
    rows = [
        {"domain": "d", "seed": seed, "method": "cqm", "step": step, "loss": float(step + seed)}
        for seed in (1, 3)
        for step in range(1001)
    ]
    rows.append({"domain": "d", "seed": 1, "method": "cqm", "step": 2000, "loss": 0.0})
    x, y = figures.mean_curves(rows, "d", "step", "loss", ("cqm", "sf"))["cqm"]
    assert len(x) <= 61
    assert (x[0], x[-1]) == (0, 1000)  # not where one seed alone has a point
    assert y == [step + 2.0 for step in x]


@pytest.mark.parametrize(
    ("missing", "lost"),
    [
        ("curves", ["curves_figure"]),
        ("regret_cdf", ["regret_figure"]),
        ("alignment", ["alignment_figure"]),
        ("spectrum", ["spectrum_figure", "diagnosis_figure"]),
        ("ceilings", ["diagnosis_figure"]),
    ],
)
def test_without_its_data_a_figure_is_left_out(run, missing, lost):
    results = replace(load(run), **{missing: []})
    for name in lost:
        domain = () if name == "spectrum_figure" else ("walker-walk",)
        assert getattr(figures, name)(results, *domain) is None


def test_without_ceilings_scores_are_shown_alone(run):
    results = replace(load(run), ceilings=[])
    picture = figures.score_figure(results, "walker-walk")
    assert not {"ceiling", "chance"} & set(texts(picture))
    assert "ceiling" not in picture.caption
    assert figures.curves_figure(results, "walker-walk") is not None


def test_a_registered_method_is_drawn_in_its_colour(tmp_path, monkeypatch):
    method = Method("new", "New method", "nowhere:New", "scores", colour="#123456")
    monkeypatch.setitem(METHODS, "new", method)
    write_run(tmp_path, domains=("reacher-easy",), seeds=(7,), beyond=("new", "new+effect"))
    picture = figures.score_figure(load(tmp_path), "reacher-easy")
    assert {"New method", "New method + effect"} <= set(texts(picture))
    assert "#123456" in picture.svg


def test_figures_know_their_section_and_how_they_are_read(pictures):
    logged = [name for name, picture in pictures.items() if picture.section == "logs"]
    assert logged == ["ordinary-reacher-easy", "ordinary-walker-walk"]
    assert pictures["spectrum"].heading == pictures["diagnosis-walker-walk"].heading
    assert all(picture.heading and picture.reading for picture in pictures.values())
