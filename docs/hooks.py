"""What MkDocs needs beside its configuration: folders in the navigation, links that leave docs/."""

from __future__ import annotations

import re
from pathlib import Path, PurePosixPath
from typing import Any

DOCS = Path(__file__).parent
LINK = re.compile(r"\[([^]]*)\]\((\.\./[^)\s]+)\)")


def on_config(config: Any) -> Any:
    """Folders of the navigation become their pages, README first."""
    for entry in config.nav:
        for title, place in entry.items():
            if place.endswith("/*"):
                pages = sorted((DOCS / place[:-2]).glob("*.md"))
                pages.sort(key=lambda page: page.name != "README.md")
                entry[title] = [str(page.relative_to(DOCS)) for page in pages]
    return config


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """A link to a file of the repository that is no page becomes the file's name."""
    folder = DOCS / PurePosixPath(page.file.src_uri).parent

    def name(link: re.Match[str]) -> str:
        there = (folder / link[2].partition("#")[0]).resolve()
        if there.is_relative_to(DOCS):
            return link[0]
        path = str(there.relative_to(DOCS.parent))
        return f"`{path}`" if path in link[1] else f"{link[1]} (`{path}`)"

    return LINK.sub(name, markdown)
