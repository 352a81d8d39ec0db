import pytest

from cqm.experiments import published as paper
from cqm.experiments.methods import METHODS


def test_methods_are_in_the_order_of_the_papers_tables():
    assert paper.METHODS == ("cqm", "world", "sf", "direct", "task-td", "cocoa")
    for numbers in (paper.ACCURACY, paper.REGRET):
        assert tuple(dict.fromkeys(method for _, method in numbers)) == paper.METHODS
    vectors = {method for _, method in paper.EFFECT_NMSE}
    assert vectors == {m for m in paper.METHODS if METHODS[m].predicts != "scores"}


def test_the_papers_numbers_are_all_there():
    assert len(paper.ACCURACY) == len(paper.REGRET) == 24
    assert len(paper.EFFECT_NMSE) == 12
    assert len(paper.ABSOLUTE_NMSE) == 4
    assert len(paper.CORRELATION) == 3


@pytest.mark.parametrize(
    ("figures", "job", "value", "half", "text"),
    [
        (paper.ACCURACY, ("cartpole-swingup", "world"), 0.2521, 0.1389, "0.2521 ± 0.1389"),
        (paper.ACCURACY, ("walker-walk", "cocoa"), 0.2268, 0.0357, "0.2268 ± 0.0357"),
        (paper.REGRET, ("cartpole-swingup", "cqm"), 1e-7, 2e-7, "0.0000001 ± 0.0000002"),
        (paper.REGRET, ("cheetah-run", "task-td"), 0.0894, 0.0216, "0.0894 ± 0.0216"),
        (paper.EFFECT_NMSE, ("walker-walk", "world"), 1.646, None, "1.6460"),
        (paper.CORRELATION, ("reacher-easy", "sf"), 0.542, None, "0.542"),
    ],
)
def test_figures_stand_where_the_paper_has_them(figures, job, value, half, text):
    assert (figures[job].value, figures[job].half_width, figures[job].text) == (value, half, text)


def test_cqm_is_best_in_every_table_of_the_paper():
    for figures, sign in ((paper.ACCURACY, 1), (paper.REGRET, -1), (paper.EFFECT_NMSE, -1)):
        for domain in paper.DOMAINS:
            row = {m: sign * f.value for (d, m), f in figures.items() if d == domain}
            assert max(row, key=row.__getitem__) == "cqm"
