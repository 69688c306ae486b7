"""Sphinx's settings. `python -m book` starts it; sources lie in build/book-sources."""

import sys
from pathlib import Path

from docutils import nodes
from sphinx.application import Sphinx

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))  # `book` and `labsupport`, also for sphinx-build by hand

from labsupport import __version__  # noqa: E402

project = "The FlashAttention lab"
author = "the lab's contributors"
version = release = __version__
language = "en"
smartquotes_action = "qe"  # `--` is no dash: options begin with it

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.mathjax",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "book.tables",
    "book.crosslinks",
    "book.glossary",
    "book.figures",
    "book.further",
]
root_doc = "index"
exclude_patterns = ["**.ipynb_checkpoints"]

# Outputs are shown as they are stored: nothing is run.
nb_execution_mode = "off"
nb_merge_streams = True
myst_enable_extensions = ["dollarmath", "colon_fence"]
myst_heading_anchors = 4  # as GitHub gives them
myst_dmath_double_inline = True

# The reference; see book/reference.py. `name` in a docstring leads to that name.
default_role = "py:obj"
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
napoleon_custom_sections = [("Columns", "params_style")]
napoleon_use_ivar = True
add_module_names = False
add_function_parentheses = False
python_maximum_signature_line_length = 80
toc_object_entries_show_parents = "hide"

# One local file; see book/assets.py.
mathjax_path = "tex-svg.js"
mathjax_config_path = "mathjax.js"
myst_update_mathjax = False  # mathjax.js says it

html_theme = "pydata_sphinx_theme"
html_title = "The FlashAttention lab"
html_static_path = [str(HERE / "static"), str(HERE.parent / "build" / "book-static")]
templates_path = [str(HERE / "templates")]
html_favicon = str(HERE / "static" / "favicon.svg")
html_context = {"default_mode": "auto"}
html_css_files = ["book.css"]
html_js_files = [("book.js", {"defer": "defer"})]
html_search_scorer = str(HERE / "scorer.js")
html_copy_source = False
html_show_sourcelink = False
html_use_index = False
html_domain_indices = False
# Pages without siblings have nothing to list at their left.
ALONE = (
    "index",
    "search",
    "theory/three-days",
    "theory/checklists",
    "theory/glossary",
    "theory/references",
    "docs/install",
    "docs/class-server",
    "docs/cluster",
    "docs/versions",
    "docs/architectures",
    "docs/decisions",
)
html_sidebars = {name: [] for name in ALONE}
html_theme_options = {
    "logo": {"text": "The FlashAttention lab"},
    "navbar_align": "left",
    "navbar_end": ["theme-switcher"],
    "navbar_persistent": ["search-button"],
    "show_nav_level": 1,
    "show_toc_level": 2,
    "pygments_light_style": "a11y-high-contrast-light",
    "pygments_dark_style": "a11y-high-contrast-dark",
    "footer_start": ["licence"],
    "footer_end": [],
    "back_to_top_button": False,
    "search_as_you_type": False,
}

linkcheck_ignore = [r"http://localhost:\d+/"]
linkcheck_anchors = False
linkcheck_timeout = 30
linkcheck_retries = 2
linkcheck_workers = 8


def dashes_between(app: Sphinx, doctree: nodes.document) -> None:
    """Put a dash where Sphinx writes two hyphens between a parameter and its description."""
    for paragraph in doctree.findall(nodes.paragraph):
        for child in list(paragraph.children):
            if child == " -- ":
                paragraph.replace(child, nodes.Text(" – "))


def setup(app: Sphinx) -> None:
    """Connect to Sphinx."""
    app.connect("doctree-read", dashes_between)
