"""Sphinx extension: run the code in every page, and fail if it prints something new.

Every block of Python or shell commands in a page becomes a cell that myst-nb runs when the
documentation is built, in order, in one process per page and in an empty directory. The page shows
what was printed and drawn. If that differs from the block of text below the code, or if a block of
code would not run at all, Sphinx warns, and `make docs` fails. `make docs-outputs` writes the new
outputs into the pages instead.
"""

import json
import os
import sys
import tempfile
from pathlib import Path

from blocks import blocks, differences, misplaced
from jupyter_client import AsyncKernelManager
from sphinx.util import logging

HERE = Path(__file__).parent
HEADER = "---\nfile_format: mystnb\nkernelspec:\n  name: python3\n---\n"
# The first cell of every page; pictures are drawn as SVG on a white ground, for dark pages too.
PREPARE = """```{code-cell}
:tags: [remove-cell]
import blocks, IPython
IPython.get_ipython().config.InlineBackend.figure_formats = {"svg"}
IPython.get_ipython().config.InlineBackend.rc = {
    "figure.figsize": (6.4, 3.0), "figure.constrained_layout.use": True, "font.size": 9.5,
    "axes.spines.top": False, "axes.spines.right": False, "figure.facecolor": "white",
    "legend.frameon": False, "svg.hashsalt": "cqm"}
```
"""
log = logging.getLogger(__name__)


def cells(text):
    """A page with its blocks of code as cells, its outputs left out; None if nothing runs."""
    running = [block for block in blocks(text) if not block.exempt]
    if not running and "```{code-cell}" not in text:
        return None
    for block in reversed(running):
        cell = f"```{{code-cell}}\n{block.code}```\n"
        if block.language == "sh":
            run = f"blocks.shell({block.code!r})"
            cell = (
                f"```sh\n{block.code}```\n\n```{{code-cell}}\n:tags: [remove-input]\n{run}\n```\n"
            )
        text = text[: block.span[0]] + cell + text[block.end :]
    title, gap, rest = text.partition("\n")
    return f"{HEADER}{title}{gap}\n{PREPARE}\n{rest}"


def read(app, docname, source):
    """Turn a page into a notebook before it is parsed."""
    for line in misplaced(source[0]):
        log.warning("code that does not run: %s", line, location=docname)
    source[0] = cells(source[0]) or source[0]


def check(app, doctree):
    """Compare what the cells of a page printed with the outputs that the page shows."""
    docname = app.env.docname
    path = Path(app.env.doc2path(docname))
    made = Path(app.outdir).parent / "jupyter_execute" / f"{docname}.ipynb"
    if path.suffix != ".md" or not made.exists():
        return
    text = path.read_text()
    running = [block for block in blocks(text) if not block.exempt]
    printed = {}  # by code, as a page may have cells that are not blocks
    for cell in json.loads(made.read_text())["cells"]:
        if cell["cell_type"] == "code":
            stdout, stderr = outputs(cell)
            printed.setdefault("".join(cell["source"]), []).append(stdout)
            if "Warning" in stderr:
                log.warning("a cell warns: %s", stderr, location=docname)
    found = []
    for block in running:
        code = block.code if block.language == "python" else f"blocks.shell({block.code!r})"
        if made_by := printed.get(code.rstrip("\n")):  # none if the page failed before
            found.append((block, made_by.pop(0)))
    if app.config.update_outputs:
        path.write_text(updated(text, found))
        return
    for block, new in found:
        for difference in differences(block.shown or "", new):
            log.warning(
                "changed output: %s\nof the block\n%s\nwhich prints\n%s",
                difference,
                block.code,
                new,
                location=(docname, text[: block.span[0]].count("\n") + 1),
            )
            break


def outputs(cell):
    """What a cell printed or displayed as text, and what it wrote to standard error."""
    streams, displayed = {}, ""
    for output in cell["outputs"]:
        if output["output_type"] == "stream":  # myst-nb merges all parts into the first one
            streams.setdefault(output["name"], "".join(output["text"]))
        elif "text/plain" in output.get("data", {}) and "image/svg+xml" not in output["data"]:
            displayed += "".join(output["data"]["text/plain"]) + "\n"
    return streams.get("stdout", "") + displayed, streams.get("stderr", "")


def updated(text, found):
    """The page with new outputs below its blocks of code, where there are any."""
    for block, new in reversed(found):
        shown = f"\n```text\n{new.rstrip()}\n```\n" if new.strip() else ""
        text = text[: block.span[1]] + shown + text[block.end :]
    return text


def use_sockets():
    """Let kernels talk through files instead of ports.

    Jupyter chooses ports before it uses them, so that on a busy machine another process may take
    them in between.
    """
    original = AsyncKernelManager.__init__

    def init(self, *args, **kwargs):
        kwargs |= {"transport": "ipc", "ip": str(Path(tempfile.mkdtemp()) / "kernel")}
        original(self, *args, **kwargs)

    AsyncKernelManager.__init__ = init


def setup(app):
    """Connect the two steps; called by Sphinx."""
    use_sockets()
    known = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(HERE), *([known] if known else [])])
    os.environ.setdefault("MUJOCO_GL", "disable")
    os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    app.add_config_value("update_outputs", False, "", [bool, int, str])
    app.connect("source-read", read)
    app.connect("doctree-read", check)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
