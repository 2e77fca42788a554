"""The site: ``make docs`` builds it from this folder's Markdown and from the docstrings.

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
# An example is a file of the repository, not a page: the site hands it out as a download.
suppress_warnings = ["myst.header"]

autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
napoleon_numpy_docstring = False
napoleon_use_ivar = True
python_use_unqualified_type_names = True

copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True

# These show what a diff takes away and adds.
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

# Files outside of this folder that have a page here.
_PAGES = {"../BUILD.md": "build.md", "../README.md": "index.md", "../CHANGELOG.md": "changelog.md",
          "../CONTRIBUTING.md": "contributing.md", "../SECURITY.md": "security.md",
          "../benchmarks/RESULTS.md": "results.md",
          "../examples": "examples.md"}
# Links of a file there, but for those that MyST's `relative-docs` takes, and those that lead away.
_FROM_REPOSITORY = re.compile(r"\]\((?!docs/|#|[a-z]+:)")
_TO_PAGE = re.compile(r"\]\((" + "|".join(map(re.escape, _PAGES)) + r")(#[^)]*)?\)")


def _lead_to_pages(app, name, source):
    """Leads links into the repository to the pages that hold the same."""
    del app, name
    source[0] = _to_pages(source[0])


def _to_pages(text: str) -> str:
    return _TO_PAGE.sub(lambda found: f"]({_PAGES[found[1]]}{found[2] or ''})", text)


def _lead_included_to_pages(app, relative_path, parent, source):
    """The same in an included file, which stands in the repository's own folder."""
    del app, relative_path, parent
    source[0] = _to_pages(_FROM_REPOSITORY.sub("](../", source[0]))


def setup(app):
    app.connect("source-read", _lead_to_pages)
    app.connect("include-read", _lead_included_to_pages)
