"""How `make docs` builds the site. Its source is the repository, so that links are those of GitHub."""

from __future__ import annotations

import re
from typing import Any

project = "infinity"
author = "The authors of infinity"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinxcontrib.mermaid"]
myst_fence_as_directive = ["mermaid"]
root_doc = "README"
include_patterns = ["README.md", "CHANGELOG.md", "CONTRIBUTING.md", "docs/*.md", "benchmarks/README.md"]
exclude_patterns = [".*", "build", "infinity", "csrc", "tests", "benchmarks/results"]
html_theme = "furo"
html_title = "infinity"
# `name` in a docstring is code.
default_role = "code"
autodoc_typehints = "none"
myst_heading_anchors = 4


def _navigate(app: Any, name: str, source: list[str]) -> None:
    """Give the front page's list of pages to the navigation, too: GitHub would show a `toctree` as code."""
    if name == root_doc:
        pages = source[0].split("\n## Documentation\n")[1]
        for caption, entries in re.findall(r"^- ([^:\n]+): (.+(?:\n  .+)*)", pages, flags=re.M):
            found = "\n".join(re.findall(r"\]\(([^)]+)\.md\)", entries))
            source[0] += f"\n\n```{{toctree}}\n:hidden:\n:caption: {caption}\n\n{found}\n```\n"


def setup(app: Any) -> None:
    """Called by Sphinx."""
    app.connect("source-read", _navigate)
