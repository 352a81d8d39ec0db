"""The code in Markdown pages: find its blocks, run them, and compare what they print.

A page is plain Markdown. A block of Python or of shell commands runs where it stands, and a block
of text right below it is what it prints:

    ```python
    print(6 * 7)
    ```

    ```text
    42
    ```

A comment such as `<!-- not run: takes hours -->` above a block exempts it. `executed.py` runs the
blocks of the documentation when it is built, and `readme.py` those of the README.
"""

import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

_FENCE = re.compile(
    r"^(?P<exempt><!-- not run: [^\n]+ -->\n)?"
    r"```(?P<language>python|sh)\n(?P<code>.*?)^```\n"
    r"(?:\n```text\n(?P<shown>.*?)^```\n)?",
    re.MULTILINE | re.DOTALL,
)
_UNNAMED = re.compile(r"^[ >-]*```(?P<language>[^\n`]*)\n(?P<code>.*?)^[ >-]*```\n", re.M | re.S)
_VERSIONS = re.compile(r"^- cqm \d.*, python \d.*$", re.MULTILINE)  # the last line of a model card
NUMBER = re.compile(r"-?\d+(?:\.\d+)?(?:e[+-]?\d+)?")


@dataclass(frozen=True)
class Block:
    """A block of code in a page, and the block of output below it if there is one."""

    language: str
    code: str
    shown: str | None
    exempt: bool
    """Whether the page says that it does not run."""
    section: str
    span: tuple[int, int]
    """Start and end of the code in the page, with its fences but without its output."""
    output_span: tuple[int, int]
    """Start and end of the shown output in the page, without its fences."""
    end: int
    """End of everything, output and fences included."""


def blocks(text):
    """All blocks of Python and of shell commands, in order."""
    return [
        Block(
            language=match["language"],
            code=match["code"],
            shown=match["shown"],
            exempt=match["exempt"] is not None,
            section=["", *re.findall(r"^## (.*)$", text[: match.start()], re.MULTILINE)][-1],
            span=(match.start(), match.end("code") + len("```\n")),
            output_span=match.span("shown"),
            end=match.end(),
        )
        for match in _FENCE.finditer(text)
    ]


def misplaced(text):
    """What would be shown as code without ever running: unnamed and indented blocks of code."""
    found = {block.code for block in blocks(text)}
    return [
        f"```{match['language']} {match['code'].strip().splitlines()[0]}"
        for match in _UNNAMED.finditer(text)
        if match["language"].strip() in ("", "python", "sh", "bash", "console", "py")
        and match["code"] not in found
    ]


def shell(code):
    """Run commands one after the other, as a reader would type them, and print what they print."""
    programs = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    for line in re.split(r"(?<!\\)\n", code.strip()):  # a backslash continues a command
        done = subprocess.run(
            ["bash", "-c", line],
            env={**os.environ, "PATH": programs},
            capture_output=True,
            text=True,
        )
        if done.returncode or "Warning" in done.stderr or "cqm: warning" in done.stderr:
            raise RuntimeError(f"{line}\n{done.stdout}\n{done.stderr}")
        print(done.stdout, end="", flush=True)


def differences(shown, made, *, relative=0.05, of_line=0.02, absolute=1e-9):
    """Where two texts differ: in a word or a whole number at all, in a decimal beyond tolerance.

    The tolerance is a share of the number itself plus a share of the largest number on its line;
    rounding errors do not matter.
    The width of gaps does not matter, as columns are as wide as their numbers; nor do versions.
    """
    shown, made = (_VERSIONS.sub("- versions", text) for text in (shown, made))
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
