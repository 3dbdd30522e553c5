"""Hooks that MkDocs calls while it builds the documentation site.

They expand folders in the navigation, add pages from outside docs/ to the site, and rewrite links
to files outside docs/.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

DOCS = Path(__file__).parent
LINK = re.compile(r"\[([^]]*)\]\((\.\./[^)\s]+)\)")

OUTSIDE = ("CONTRIBUTING.md", "CHANGELOG.md")
"""Pages in the root folder of the repository that are added to the site."""

HISTORY = ("decisions/", "lab/", "CHANGELOG.md", "CONTRIBUTING.md")
"""Pages and folders that few readers search for."""


def title(page: Path) -> str:
    """Return the first heading of a page, without the number that pages in decisions/ have."""
    heading = re.search(r"^# (?:\d{4}: )?(.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    name = heading[1].replace("`", "") if heading else page.stem
    return name[:1].upper() + name[1:] if page.parent.name in ("decisions", "lab") else name


def pages(folder: str) -> list[dict[str, str]]:
    """Return the pages of a folder as entries of the navigation, with README.md first."""
    found = sorted((DOCS / folder).glob("*.md"), key=lambda page: (page.name != "README.md", page))
    return [{title(page): page.relative_to(DOCS).as_posix()} for page in found]


def expanded(entries: list[Any]) -> Iterator[Any]:
    """Replace each entry `folder/*` of the navigation with the pages in that folder."""
    for entry in entries:
        if isinstance(entry, str) and entry.endswith("/*"):
            yield from pages(entry[:-2])
        elif isinstance(entry, dict):
            yield {
                name: list(expanded(inside)) if isinstance(inside, list) else inside
                for name, inside in entry.items()
            }
        else:
            yield entry


def on_config(config: Any) -> Any:
    """Expand folders in the navigation. MkDocs calls this hook after reading mkdocs.yml."""
    config.nav = list(expanded(config.nav))
    return config


def on_files(files: Any, config: Any) -> Any:
    """Add the pages of the repository's root folder to the site. MkDocs calls this hook."""
    from mkdocs.structure.files import File

    for name in OUTSIDE:
        text = (DOCS.parent / name).read_text(encoding="utf-8")
        files.append(File.generated(config, name, content=inside_docs(text)))
    return files


def inside_docs(text: str) -> str:
    """Rewrite the links of a page in the repository's root folder as if it were in docs/."""

    def moved(link: re.Match[str]) -> str:
        target = link[1]
        if target.startswith("docs/"):
            return f"]({target.removeprefix('docs/')})"
        return link[0] if target.partition("#")[0] in OUTSIDE else f"](../{target})"

    return re.sub(r"\]\((?!\w+:|#)([^)\s]+)\)", moved, text)


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Change the Markdown text of a page. MkDocs calls this hook.

    A link to a file that is not on the site is replaced by the name of the file. The page for
    contributors gets a list of the decisions and lab pages. In search results, pages for
    contributors come after the others.
    """
    if page.file.src_uri.startswith(HISTORY):
        page.meta["search"] = {"boost": 0.3}
    folder = DOCS / PurePosixPath(page.file.src_uri).parent

    def name(link: re.Match[str]) -> str:
        there = (folder / link[2].partition("#")[0]).resolve()
        if there.is_relative_to(DOCS):
            return link[0]
        path = there.relative_to(DOCS.parent).as_posix()
        if path in OUTSIDE:
            up = "../" * (len(PurePosixPath(page.file.src_uri).parts) - 1)
            return f"[{link[1]}]({up}{link[2].rpartition('../')[2]})"
        return f"`{path}`" if path in link[1] else f"{link[1]} (`{path}`)"

    if page.file.src_uri == "contributors.md":
        listed = [*pages("decisions"), *pages("lab")]
        entries = (f"- [{name}]({path})" for entry in listed for name, path in entry.items())
        markdown += "\n" + "\n".join(entries) + "\n"
    return LINK.sub(name, markdown)
