"""Checks every link within the built site: pages, files and anchors.

    python docs/links.py build/site

Goes in: a folder of HTML.  Comes out: exit status 0, or 1 and a line for each broken link.  Links
to other sites are checked by ``python -m sphinx -b linkcheck docs build/links``.
"""

from __future__ import annotations

import html.parser
import pathlib
import sys
import urllib.parse

# Folders without pages for readers; their links are not checked.
_NO_PAGES = ("_modules", "_static")


class Page(html.parser.HTMLParser):
    """The anchors and links of a page.

    Attributes:
      anchors: the ids of its elements.
      links: the targets of its links, pictures, scripts and styles.
    """

    def __init__(self, path: pathlib.Path) -> None:
        super().__init__()
        self.anchors: set[str] = set()
        self.links: set[str] = set()
        self.feed(path.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        del tag
        for name, value in attrs:
            if name == "id" and value:
                self.anchors.add(value)
            elif name in ("href", "src") and value:
                self.links.add(value)


def broken(site: pathlib.Path) -> list[str]:
    """A line for each broken link within ``site``."""
    site = site.resolve()
    pages = {path: Page(path) for path in sorted(site.rglob("*.html"))
             if path.relative_to(site).parts[0] not in _NO_PAGES}
    if not pages:
        return [f"no pages in {site}"]
    problems = []
    for path, page in pages.items():
        for link in sorted(page.links):
            parts = urllib.parse.urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = (path.parent / urllib.parse.unquote(parts.path)).resolve() \
                if parts.path else path
            target_page = pages.get(target)
            if not target.exists():
                problems.append(f"{path.relative_to(site)}: {link}: no such file")
            elif parts.fragment and target_page and parts.fragment not in target_page.anchors:
                problems.append(f"{path.relative_to(site)}: {link}: no such anchor")
    return problems


if __name__ == "__main__":
    lines = broken(pathlib.Path(sys.argv[1]))
    print(*lines, sep="\n")
    sys.exit(bool(lines))
