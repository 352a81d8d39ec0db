"""The documentation is checked: outputs, tables and figures in its prose follow from their sources.

That every block of code runs and prints what is shown is checked when the documentation is built.
"""

import re
import subprocess
import sys
from pathlib import Path

import commands
import executed
import figures as drawn
import pytest
import tables
from blocks import blocks, differences, misplaced

from cqm.cli import COMMANDS

ROOT = Path(__file__).parent.parent
PAGES = sorted(path for path in (ROOT / "docs").rglob("*.md") if "_build" not in path.parts)
NUMBER = re.compile(r"(?<![\w.])\d+\.\d+(?:e-?\d+)?(?!\.?\d)")
MARKER = re.compile(r"^ *<!-- figures(?::| not in a file:) (.+) -->$")


def paragraphs(text):
    """Pairs of a marker, or None, and the paragraph, list item or table below it."""
    text = re.sub(r"^```.*?^```$", "", text, flags=re.M | re.S)
    text = re.sub(r"<!-- table .*?<!-- end of table -->", "", text, flags=re.S)
    marker, lines = None, []
    for line in [*text.splitlines(), ""]:
        begins = not line.strip() or MARKER.match(line) or re.match(r" *[-*] ", line)
        if begins and lines:
            yield marker, "\n".join(lines)
            marker, lines = None, []
        if MARKER.match(line):
            marker = line.strip()
        elif line.strip():
            lines.append(line)


def figures(paragraph):
    """The decimal numbers that a paragraph quotes, without those in code and in versions."""
    return NUMBER.findall(re.sub(r"`[^`]*`|version \d+\.\d+", "", paragraph, flags=re.IGNORECASE))


def quoted_without_source(marker, paragraph):
    """The figures of a paragraph that no file named by its marker has, rounded as they are."""
    if marker.startswith("<!-- figures not in a file:"):
        return []
    sources = MARKER.match(marker)[1].split(", ")
    content = " ".join((ROOT / source).read_text() for source in sources)
    values = [float(number) for number in re.findall(r"-?\d+\.?\d*(?:e-?\d+)?", content)]
    if "%" in paragraph:
        values += [100 * value for value in values]
    return [number for number in figures(paragraph) if not any(shown_as(v, number) for v in values)]


def shown_as(value, number):
    """Whether a value is a number to the digits with which the number is written."""
    decimals = len(number.partition("e")[0].partition(".")[2])
    exponent = int(number.partition("e")[2] or 0)
    return abs(abs(value) - float(number)) <= 0.501 * 10.0 ** (exponent - decimals)


def test_a_changed_output_is_noticed():
    shown = "state  best    advantage\n0      charge  0.545 [0.39, 0.7]\n1 of 3 states"
    assert differences(shown, shown.replace("  0.5", "    0.5")) == []
    assert differences(shown, shown.replace("0.545", "0.556")) == []
    for old, new in [("charge", "wait"), ("0.545", "0.61"), ("1 of 3", "2 of 3"), ("]", "")]:
        assert differences(shown, shown.replace(old, new)), new
    assert differences(shown, f"{shown}\nand more")


PAGE = """# Title

```python
print(6 * 7)
```

```text
42
```

<!-- not run: takes hours -->
```sh
cqm reproduce
```

```sh
cqm --version
```
"""


def test_blocks_become_cells_and_their_outputs_are_left_out():
    found = blocks(PAGE)
    assert [(one.language, one.shown, one.exempt) for one in found] == [
        ("python", "42\n", False),
        ("sh", None, True),
        ("sh", None, False),
    ]
    made = executed.cells(PAGE)
    assert "```{code-cell}\nprint(6 * 7)\n```" in made
    assert "42" not in made
    assert "blocks.shell('cqm --version\\n')" in made
    assert "blocks.shell('cqm reproduce" not in made
    assert executed.cells("# Title\n\nNo code.\n") is None


def test_new_outputs_are_written_into_a_page():
    python, _, shell = blocks(PAGE)
    made = executed.updated(PAGE, [(python, "43\n"), (shell, "cqm 1.0\n")])
    assert "```text\n43\n```\n\n<!-- not run" in made
    assert made.endswith("```sh\ncqm --version\n```\n\n```text\ncqm 1.0\n```\n")
    assert blocks(executed.updated(made, [(blocks(made)[0], "")]))[0].shown is None


@pytest.mark.slow
def test_the_tutorial_on_ray_prints_what_is_shown(tmp_path):
    """Ray takes long to start, so this page does not run when the documentation is built."""
    found = blocks((ROOT / "docs" / "tutorials" / "ray.md").read_text())
    assert all(block.exempt for block in found)
    code = "".join(block.code for block in found)
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert differences("".join(block.shown for block in found), done.stdout) == []


def test_code_that_would_not_run_is_noticed():
    assert misplaced(PAGE) == []
    assert misplaced("```\ncqm fit\n```\n") == ["``` cqm fit"]
    assert misplaced("- item\n  ```python\n  print(1)\n  ```\n") == ["```python print(1)"]
    assert misplaced("```text\nplain\n```\n") == []


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.stem)
def test_every_block_of_code_runs_or_says_why_not(page):
    assert misplaced(page.read_text()) == []


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.stem)
def test_tables_follow_from_their_sources(page):
    text = page.read_text()
    assert tables.with_tables(text) == text


def test_all_tables_are_used():
    text = "".join(page.read_text() for page in PAGES)
    assert {match[2] for match in tables.MARKERS.finditer(text)} == set(tables.FILLED)


@pytest.mark.parametrize("name", drawn.FIGURES)
def test_figures_follow_from_their_sources(name):
    for path, content in drawn.pictures(name):
        assert path.read_text() == content, path.name


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.stem)
def test_figures_in_prose_are_in_their_sources(page):
    for marker, paragraph in paragraphs(page.read_text()):
        if marker:
            assert quoted_without_source(marker, paragraph) == [], paragraph


def test_figures_of_the_reproduction_name_their_sources():
    unmarked = [
        paragraph
        for marker, paragraph in paragraphs((ROOT / "docs" / "reproduction.md").read_text())
        if figures(paragraph) and not marker
    ]
    assert unmarked == []


def test_a_wrong_figure_is_noticed():
    marker = "<!-- figures: benchmarks/results/prototypes.csv -->"
    assert quoted_without_source(marker, "a floor of 0.24, or 0.2408") == []
    assert quoted_without_source(marker, "a floor of 0.27") == ["0.27"]
    assert quoted_without_source(marker, "in code, `0.27`, and version 3.17.0") == []


def test_the_reference_has_the_options_of_every_command():
    text = commands.reference()
    assert "## cqm fit" in text
    assert "--candidates" in text
    for name in COMMANDS:
        assert f"cqm {name}" in text, name
