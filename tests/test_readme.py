"""The README keeps its promises: code runs and prints what is shown, tables and links are right."""

import re
import subprocess
import tomllib
from pathlib import Path

import pytest
import readme
import yaml
from blocks import blocks, differences

ROOT = Path(__file__).parent.parent
TEXT = readme.README.read_text()
EXAMPLES = blocks(TEXT)


@pytest.mark.slow
@pytest.mark.parametrize(
    "example",
    [pytest.param(one, id=f"{one.section}-{one.language}") for one in EXAMPLES if readme.runs(one)],
)
def test_examples_print_what_is_shown(example, tmp_path):
    """The code runs as it stands in the README, in a new process and an empty directory."""
    made = readme.output(example, tmp_path)
    if example.shown is None:
        assert "\nBest first action for 100 * pole_cos (linear in the features)\n" in made, made
    else:
        assert differences(example.shown, made) == []  # another processor may round differently


def test_every_python_example_shows_its_output():
    shown = [(one.language, one.shown is not None) for one in EXAMPLES if readme.runs(one)]
    assert shown == [("python", True), ("sh", False), ("python", True), ("python", True)]


def test_commands_that_are_too_slow_to_run_here_exist():
    """Installing and `make` take minutes: their extras and targets are looked up instead."""
    commands = [line for one in EXAMPLES if not readme.runs(one) for line in one.code.splitlines()]
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    assert [line.split()[0] for line in commands] == ["pip", "make", "make"]
    for line in commands:
        words = line.partition("#")[0].split()
        if words[0] == "make":
            subprocess.run([*words, "--dry-run"], cwd=ROOT, check=True, capture_output=True)
        else:
            asked = re.fullmatch(r"pip install '\.\[(\w+)\]'", " ".join(words))
            assert asked, line
            assert asked[1] in extras


def test_the_table_follows_from_the_results():
    assert readme.with_table(TEXT) == TEXT
    assert readme.with_table(TEXT.replace("0.963", "0.969")) == TEXT


def test_the_pictures_are_what_the_code_draws():
    made = readme.picture()
    for theme, colour in readme.THEMES.items():
        svg = (readme.PICTURES / f"effects-{theme}.svg").read_text()
        assert len(svg) < 100_000
        # A point of the page: another version of the simulator or of the fonts moves lines by less.
        new = made.replace("currentColor", colour)
        assert differences(svg, new, relative=0.0, of_line=0.0, absolute=1.0) == []


def test_every_link_and_picture_exists():
    targets = re.findall(r"\]\(([^)#]+)|(?:src|srcset)=\"([^\"]+)\"", TEXT)
    targets = [link or picture for link, picture in targets]
    assert len(targets) > 10
    assert [target for target in targets if not (ROOT / target).exists()] == []


def test_the_citation_is_that_of_the_citation_file():
    paper = yaml.safe_load((ROOT / "CITATION.cff").read_text())["preferred-citation"]
    entry = dict(re.findall(r"^  (\w+) += \{(.*?)\},?$", TEXT, re.M))
    authors = (f"{a['family-names']}, {a['given-names']}" for a in paper["authors"])
    assert entry["title"] == paper["title"]
    assert entry["author"] == " and ".join(authors)
