"""Settings of Sphinx for the documentation's site, which `make docs` builds. The pages are Markdown, read by MyST."""

from __future__ import annotations

import sys
from pathlib import Path

import ampatch

sys.path.insert(0, str(Path(__file__).parent))

project = "ampatch"
version = release = ampatch.__version__

extensions = ["myst_parser", "ampatch_docs.markdown"]
root_doc = "index"
exclude_patterns = ["ampatch_docs"]

# Headings get the anchors that GitHub gives them. The build checks links to them, and so to all pages.
myst_heading_anchors = 4

html_theme = "furo"
html_title = "ampatch"
html_show_copyright = False
