"""Checks the links of a built site: each page and each anchor that a link inside the site names is there."""

from __future__ import annotations

import html.parser
import pathlib
import sys
import urllib.parse

ATTRIBUTES = {"a": "href", "link": "href", "img": "src", "script": "src", "source": "src", "iframe": "src"}


class Page(html.parser.HTMLParser):
    """The anchors of a page, and its links: the tag and where it leads."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.anchors: set[str] = set()
        self.links: list[tuple[str, str]] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        self.anchors |= {name for name in (values.get("id"), values.get("name") if tag == "a" else None) if name}
        if target := values.get(ATTRIBUTES.get(tag, "")):
            self.links.append((tag, target))


class Site:
    """The pages of a folder."""

    def __init__(self, folder: pathlib.Path) -> None:
        self.folder = folder.resolve()
        self.pages = {path: Page(path.read_text(encoding="utf-8")) for path in sorted(self.folder.rglob("*.html"))}

    def links(self) -> list[tuple[pathlib.Path, str, str]]:
        return [(path, tag, target) for path, page in self.pages.items() for tag, target in page.links]

    def problems(self) -> list[str]:
        """Links that lead nowhere, and what a page would load from elsewhere: the site works without a network."""
        found = [(page, target, self._problem(page, tag, target)) for page, tag, target in self.links()]
        return [f"{page.relative_to(self.folder)}: {target}: {why}" for page, target, why in found if why]

    def _problem(self, page: pathlib.Path, tag: str, target: str) -> str:
        parts = urllib.parse.urlsplit(target)
        if parts.scheme == "data":
            return ""
        if parts.scheme or parts.netloc:
            return "" if tag == "a" else "loaded from elsewhere"
        path = (page.parent / urllib.parse.unquote(parts.path)).resolve() if parts.path else page
        if not path.is_relative_to(self.folder) or not path.is_file():
            return "no such file"
        anchor = urllib.parse.unquote(parts.fragment)
        return "no such anchor" if anchor and path in self.pages and anchor not in self.pages[path].anchors else ""

    def outside(self) -> list[str]:
        """Addresses outside the site; nothing fetches them."""
        return sorted(
            {target for _, tag, target in self.links() if tag == "a" and urllib.parse.urlsplit(target).scheme}
        )


def check(folder: pathlib.Path) -> int:
    """Prints the problems and the addresses outside; returns the number of problems."""
    site = Site(folder)
    problems = site.problems()
    for line in problems:
        print(f"link: {line}")
    print(f"{len(site.pages)} pages, {len(site.links())} links, {len(problems)} wrong; outside, not fetched:")
    for address in site.outside():
        print(f"  {address}")
    return len(problems)


if __name__ == "__main__":
    sys.exit(1 if check(pathlib.Path(sys.argv[1])) else 0)
