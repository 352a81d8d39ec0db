"""The command-line reference as Markdown: the help of every command, from its parser."""

import contextlib
import io
import os

from cqm.cli import COMMANDS, main

MARKER = "<!-- commands: "


def command_help(name):
    """What `cqm NAME --help` prints, 80 columns wide."""
    os.environ["COLUMNS"] = "80"
    with contextlib.redirect_stdout(io.StringIO()) as text, contextlib.suppress(SystemExit):
        main([*name.split(), "--help"])
    return text.getvalue().strip()


def reference():
    """A section for each command."""
    return "\n".join(
        f"## cqm {name}\n\n```text\n{command_help(name)}\n```\n"
        for name in COMMANDS
        if not any(other.startswith(f"{name} ") for other in COMMANDS)  # a group of others
    )


def read(app, docname, source):
    """Fill in the reference where a page has the marker."""
    if MARKER in source[0]:
        source[0] = source[0][: source[0].index(MARKER)] + reference()
