"""Sphinx: the pages are Markdown (MyST), the theme is furo. `make docs` builds the site into docs/_build/html."""

from __future__ import annotations

import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
os.environ.setdefault("DS_ACCELERATOR", "cpu")

from pygments.lexers.data import JsonLexer  # noqa: E402
from sphinx.application import Sphinx  # noqa: E402

from alignment import __version__  # noqa: E402

project = "deepspeed-alignment"
author = "the authors of deepspeed-alignment"
version = release = __version__
# Where the repository is, with the branch, such as https://github.com/me/deepspeed-alignment/blob/main. Links to its
# files go there; without it they are shown as paths.
repository_url = os.environ.get("DOCS_REPOSITORY_URL", "")

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
    "tools.documentation.site",
    "tools.documentation.options",
]
exclude_patterns = ["_build", "pictures"]
myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 4
suppress_warnings = ["myst.header"]  # a generated page may begin below the first level

# Single backticks in docstrings are code.
default_role = "code"
nitpicky = True
nitpick_ignore_regex = [
    # Types of other libraries, and of ours that have no page: they are in signatures, and no text refers to them.
    (r"py:(class|obj|data)", r".*"),
]
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 90

html_theme = "furo"
html_title = project
html_static_path = ["static"]
html_css_files = ["site.css"]
html_show_sphinx = False
html_copy_source = False
html_theme_options = {"top_of_page_buttons": []}
toc_object_entries_show_parents = "hide"
html_show_copyright = False
copybutton_prompt_text = "$ "
copybutton_only_copy_prompt_lines = True
copybutton_line_continuation_character = "\\"
pygments_style = "friendly"
pygments_dark_style = "github-dark"

linkcheck_timeout = 15
linkcheck_retries = 1
linkcheck_ignore = [r"http://localhost.*", r"http://127\.0\.0\.1.*"]


def _is_plain_field(app: Sphinx, what: str, name: str, member: object, skip: bool, options: object) -> bool | None:
    """Skip the fields of named tuples that only say "Alias for field number N"; their classes describe them."""
    return True if str(getattr(member, "__doc__", "")).startswith("Alias for field number") else None


def setup(app: Sphinx) -> None:
    """JSON Lines are shown as JSON."""
    app.add_lexer("jsonl", JsonLexer)
    app.connect("autodoc-skip-member", _is_plain_field)
