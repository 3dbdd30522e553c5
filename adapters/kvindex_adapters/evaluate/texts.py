"""Texts that every Python installation contains: reference documentation and library code."""

from __future__ import annotations

import random
import re
import sys
import sysconfig
from pathlib import Path


def python_reference() -> list[str]:
    """Return paragraphs of prose from the Python language reference.

    The module `pydoc_data.topics` contains them (PSF license).
    """
    from pydoc_data.topics import topics

    texts: dict[str, None] = {}
    for name in sorted(topics):
        for paragraph in topics[name].split("\n\n"):
            if paragraph.startswith((" ", "\t", "*", "+", "-", "|")) or "::=" in paragraph:
                continue  # skip lists, tables, code and grammar
            plain = re.sub(r"[*`\"]", "", re.sub(r"\s+", " ", paragraph)).strip()
            if len(plain) >= 120:
                texts[plain] = None
    return list(texts)


def paragraphs(text: str) -> list[str]:
    """Split a text at blank lines."""
    return [part.strip() for part in re.split(r"\n\s*\n", text) if part.strip()]


def python_source() -> str:
    """Return the source code of the standard library's modules, ordered by name."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    files = sorted(path for path in folder.glob("*.py") if not path.name.startswith("_"))
    return "\n\n".join(f"# {path.name}\n{path.read_text('utf-8', 'ignore')}" for path in files)


def main() -> None:
    """Write prose.txt and code.txt to the folder that the command line names.

    Each file has at most 400,000 characters.
    """
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    prose = python_reference()
    random.Random(0).shuffle(prose)
    (folder / "prose.txt").write_text("\n\n".join(prose)[:400_000], encoding="utf-8")
    (folder / "code.txt").write_text(python_source()[:400_000], encoding="utf-8")


if __name__ == "__main__":
    main()
