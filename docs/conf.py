"""Sphinx configuration."""

import cqm

project = "cqm"
author = "The cqm developers"
copyright = "2026, The cqm developers"
version = release = cqm.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode"]
myst_heading_anchors = 3
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_default_options = {"members": True, "show-inheritance": True}
default_role = "code"
exclude_patterns = ["_build"]

html_theme = "furo"
html_static_path = ["_static"]
html_css_files = ["tables.css"]
html_title = f"cqm {release}"
