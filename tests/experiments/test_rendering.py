import math
import re

import pytest

from cqm.experiments.rendering import (
    Cell,
    Table,
    latex,
    markdown,
    number,
    with_interval,
    write_tables,
)

NAN = math.nan


@pytest.mark.parametrize(
    ("mean", "half", "text"),
    [
        (0.95531, 0.029, "0.9553 ± 0.0290"),
        (1e-7, 2e-7, "0.00000010 ± 0.00000020"),
        (0.0, 0.0, "0.0000"),
        (7.1e-6, NAN, "0.0000071"),
        (-0.25, 0.5, "−0.2500 ± 0.5000"),
        (NAN, NAN, "undefined"),
        (math.inf, NAN, "inf"),
        (3e-17, NAN, "3.0e-17"),
    ],
)
def test_numbers_have_as_many_decimals_as_they_need(mean, half, text):
    assert with_interval(mean, half) == text


def test_signs_can_be_shown():
    assert number(0.5, sign="+") == "+0.5000"
    assert number(-0.5, sign="+") == "−0.5000"


def test_latex_is_balanced_and_escaped():
    row = (Cell("{~^\\}"), Cell("0.5 ± 0.1", mark="better"))
    strange = Table(
        *("x", "100% & more", "a_b", ("Domain", "x#1"), ((row,),), ()),
        num_labels=1,
        notes=("≈ −1 “so”",),
    )
    text = latex(strange)
    assert r"100\% \& more" in text
    assert r"a\_b $\approx$ $-$1 ``so''" in text
    assert r"x\#1" in text
    assert r"\{\textasciitilde{}\textasciicircum{}\textbackslash{}\}" in text
    assert r"0.5 $\pm$ 0.1 $\blacktriangle$ \\" in text
    unescaped = re.sub(r"\\[{}]", "", text)
    assert unescaped.count("{") == unescaped.count("}")
    assert text.isascii()


def test_markdown_escapes_what_would_break_a_table():
    table = Table("x", "a|b", "c", ("D",), (((Cell("<i>_*`|\n", bold=True),),),), ())
    assert r"| **\<i\>\_\*\`\|** |" in markdown(table)
    assert r"### a\|b" in markdown(table)


def test_a_table_is_written_in_three_formats(tmp_path):
    row = (Cell("Reacher"), Cell("0.50", mark="agrees"))
    records = ({"domain": "reacher-easy", "mean": 0.5},)
    table = Table("x", "Title", "Caption.", ("Domain", "Score"), ((row,),), records, num_labels=1)
    write_tables([table], tmp_path)
    files = {path.name: path.read_text() for path in (tmp_path / "tables").iterdir()}
    assert sorted(files) == ["x.csv", "x.md", "x.tex"]
    assert files["x.csv"] == "domain,mean\nreacher-easy,0.5\n"
    assert files["x.md"] == (
        "### Title\n\nCaption.\n\n| Domain | Score |\n| :--- | ---: |\n| Reacher | 0.50 ≈ |\n"
    )
    assert r"Reacher & 0.50 $\approx$ \\" in files["x.tex"]
