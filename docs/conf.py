"""Sphinx configuration."""

import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import commands

import cqm

project = "cqm"
author = "The cqm developers"
copyright = "2026, The cqm developers"
version = release = cqm.__version__

extensions = [
    "myst_nb",
    "sphinx_design",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "executed",
]
myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3
nb_execution_mode = "force"
nb_execution_in_temp = True
nb_execution_timeout = 900  # seconds for one cell, on a busy machine
nb_execution_show_tb = True  # an error is a warning here, which fails the build at its end
nb_output_stderr = "remove"  # progress; warnings are errors, see executed.py
nb_merge_streams = True
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
# Written out, these would fill half a page.
autodoc_type_aliases = {
    name: name for name in ("ArrayLike", "npt.ArrayLike", "QueryLike", "Reference", "Target")
}
autodoc_default_options = {"members": True, "show-inheritance": True}
default_role = "code"
exclude_patterns = ["_build"]


def plain_aliases(app, what, name, obj, options, signature, annotation):
    """Sphinx shows the union of a type alias and None in its internal form."""
    shown = re.sub(r"TypeAliasForwardRef\('([\w.]+)'\)", r"\1", signature or "")
    return shown.replace("npt.", "") or None, annotation


def line_breaks(app, pagename, templatename, context, doctree):
    """Break names in inline code after a dot, an underscore and the like; keep errors together."""
    if "body" in context:
        body = re.sub(
            r'(?<=<span class="pre">)[^<]+',
            lambda name: re.sub(r"(?<=\w[._/:=(])(?=[\w&[{])", "<wbr>", name[0]),
            context["body"],
        )
        context["body"] = re.sub(r"(?<=±) (?=\d)|(?<=\d) (?=[≈▲▼])", "\N{NO-BREAK SPACE}", body)


def setup(app):
    app.connect("autodoc-process-signature", plain_aliases)
    app.connect("html-page-context", line_breaks)
    app.connect("source-read", commands.read)


html_theme = "furo"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_title = f"cqm {release}"
