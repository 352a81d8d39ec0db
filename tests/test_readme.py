"""The README keeps its promises: code runs and prints what is shown, tables and links are right."""

import importlib.util
import re
import subprocess
import tomllib
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parent.parent
spec = importlib.util.spec_from_file_location("readme", ROOT / "docs" / "readme.py")
readme = importlib.util.module_from_spec(spec)
spec.loader.exec_module(readme)

TEXT = readme.README.read_text()
EXAMPLES = readme.examples(TEXT)
NUMBER = re.compile(r"-?\d+(?:\.\d+)?(?:e[+-]?\d+)?")


def differences(shown, made, *, relative=0.05, of_line=0.02, absolute=0.0):
    """Where two texts differ: in a word or a whole number at all, in a decimal beyond tolerance.

    The tolerance is a share of the number itself plus a share of the largest number on its line.
    The width of gaps does not matter, as columns are as wide as their numbers.
    """
    words = [" ".join(NUMBER.sub("#", text).split()) for text in (shown, made)]
    if words[0] != words[1]:
        return words
    found = []
    for line, other in zip(shown.splitlines(), made.splitlines(), strict=True):
        old, new = NUMBER.findall(line), NUMBER.findall(other)
        largest = max((abs(float(number)) for number in old), default=0.0)
        found += [
            (before, after)
            for before, after in zip(old, new, strict=True)
            if before != after
            and not (
                "." in before + after
                and abs(float(after) - float(before))
                <= relative * abs(float(before)) + of_line * largest + absolute
            )
        ]
    return found


def test_a_changed_output_is_noticed():
    shown = "state  best    advantage\n0      charge  0.545 [0.39, 0.7]\n1 of 3 states"
    assert differences(shown, shown.replace("  0.5", "    0.5")) == []
    assert differences(shown, shown.replace("0.545", "0.556")) == []
    for old, new in [("charge", "wait"), ("0.545", "0.61"), ("1 of 3", "2 of 3"), ("]", "")]:
        assert differences(shown, shown.replace(old, new)), new
    assert differences(shown, f"{shown}\nand more")


@pytest.mark.slow
@pytest.mark.parametrize(
    "example",
    [pytest.param(one, id=f"{one.section}-{one.language}") for one in EXAMPLES if one.runs],
)
def test_examples_print_what_is_shown(example, tmp_path):
    """The code runs as it stands in the README, in a new process and an empty directory."""
    made = readme.output(example, tmp_path)
    if example.shown is None:
        assert made.startswith("Best first action for 100 * pole_cos (linear in the features)\n"), (
            made
        )
    else:
        assert differences(example.shown, made) == []  # another processor may round differently


def test_every_python_example_shows_its_output():
    shown = [(one.language, one.shown is not None) for one in EXAMPLES if one.runs]
    assert shown == [("python", True), ("sh", False), ("python", True), ("python", True)]


def test_commands_that_are_too_slow_to_run_here_exist():
    """Installing and `make` take minutes: their extras and targets are looked up instead."""
    commands = [line for one in EXAMPLES if not one.runs for line in one.code.splitlines()]
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
