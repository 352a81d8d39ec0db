"""Sphinx configuration."""

import re

import cqm

project = "cqm"
author = "The cqm developers"
copyright = "2026, The cqm developers"
version = release = cqm.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode"]
myst_heading_anchors = 3
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


def setup(app):
    app.connect("autodoc-process-signature", plain_aliases)


html_theme = "furo"
html_static_path = ["_static"]
html_css_files = ["tables.css"]
html_title = f"cqm {release}"
