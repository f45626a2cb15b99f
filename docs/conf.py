"""Settings of Sphinx for the documentation's site, which `make docs` builds. MyST reads Markdown and notebooks."""

from __future__ import annotations

import sys
from pathlib import Path

import ampatch

sys.path.insert(0, str(Path(__file__).parent))

project = "ampatch"
version = release = ampatch.__version__

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "ampatch_docs.reference",
    "ampatch_docs.markdown",
]
root_doc = "index"
exclude_patterns = ["ampatch_docs"]

# Headings get the anchors that GitHub gives them. The build checks links to them, and so to all pages.
myst_heading_anchors = 4

# Notebooks have their outputs already: `make notebook` runs them.
nb_execution_mode = "off"
nb_merge_streams = True

# The reference: signatures with their types, one parameter a line where they are long.
autodoc_default_options = {"members": True}
autodoc_typehints = "signature"
autodoc_member_order = "bysource"
python_maximum_signature_line_length = 88
napoleon_numpy_docstring = False
# Groups of the arguments of amp.initialize.
napoleon_custom_sections = [
    (group, "params_style")
    for group in (
        "Values of the level",
        "Cast lists and parts of a model",
        "Loss scale",
        "Skipped steps",
        "Logs",
    )
]
# Docstrings have names in single backticks, which become links where the reference has the name.
default_role = "py:obj"

# Two dashes stay two dashes, as in --help.
smartquotes = False

html_theme = "furo"
html_title = "ampatch"
html_show_copyright = False
html_static_path = ["ampatch_docs/static"]
html_css_files = ["site.css"]
