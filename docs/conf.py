"""Sphinx's configuration: ``make docs`` builds the site from this folder and from the docstrings.

Goes in: ``docs/*.md``, README.md, BUILD.md, CHANGELOG.md and the package.  Comes out: HTML.
"""

import re

import towerstrategy

project = "TowerStrategy"
author = "The towerstrategy founders"
copyright = "2026, the towerstrategy founders"
release = version = towerstrategy.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode",
              "sphinx_copybutton"]
exclude_patterns = ["Thumbs.db"]

myst_heading_anchors = 4
myst_links_external_new_tab = False
# Links to examples lead to files, not pages: the site offers them as downloads.
suppress_warnings = ["myst.header"]

autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
napoleon_numpy_docstring = False
napoleon_use_ivar = True
python_use_unqualified_type_names = True

copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True

# These styles color the removed and added lines of a diff.
pygments_style = "friendly"
pygments_dark_style = "monokai"
html_theme = "furo"
html_title = f"TowerStrategy {release}"
html_static_path = ["static"]
templates_path = ["templates"]
html_css_files = ["site.css"]
html_theme_options = {
    "light_css_variables": {"color-brand-primary": "#1f6fb2", "color-brand-content": "#1f6fb2"},
    "dark_css_variables": {"color-brand-primary": "#7db8e8", "color-brand-content": "#7db8e8"},
}

# Files outside of this folder -> their pages here.
_PAGES = {"../BUILD.md": "build.md", "../README.md": "index.md", "../CHANGELOG.md": "changelog.md",
          "../CONTRIBUTING.md": "contributing.md", "../SECURITY.md": "security.md",
          "../benchmarks/RESULTS.md": "results.md",
          "../examples": "examples.md"}
# Relative links of such a file, except those to docs/, which MyST's `relative-docs` adapts.
_RELATIVE_LINK = re.compile(r"\]\((?!docs/|#|[a-z]+:)")
_LINK_WITH_PAGE = re.compile(r"\]\((" + "|".join(map(re.escape, _PAGES)) + r")(#[^)]*)?\)")


def _replace_links(app, name, source):
    """Replaces a page's links to files of the repository by links to the pages of these files."""
    del app, name
    source[0] = _with_page_links(source[0])


def _with_page_links(text: str) -> str:
    return _LINK_WITH_PAGE.sub(lambda link: f"]({_PAGES[link[1]]}{link[2] or ''})", text)


def _replace_links_of_included(app, relative_path, parent, source):
    """Replaces the links of an included file, which are relative to the repository's root."""
    del app, relative_path, parent
    source[0] = _with_page_links(_RELATIVE_LINK.sub("](../", source[0]))


def setup(app):
    app.connect("source-read", _replace_links)
    app.connect("include-read", _replace_links_of_included)
