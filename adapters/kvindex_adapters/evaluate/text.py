"""Real text that every Python carries: the prose of its language reference."""

from __future__ import annotations

import re


def python_reference() -> list[str]:
    """Paragraphs of prose from `pydoc_data.topics` (the Python documentation; PSF licence)."""
    from pydoc_data.topics import topics

    kept: dict[str, None] = {}
    for name in sorted(topics):
        for paragraph in topics[name].split("\n\n"):
            if paragraph.startswith((" ", "\t", "*", "+", "-", "|")) or "::=" in paragraph:
                continue  # lists, tables, code and grammar
            plain = re.sub(r"[*`\"]", "", re.sub(r"\s+", " ", paragraph)).strip()
            if len(plain) >= 120:
                kept[plain] = None
    return list(kept)


def paragraphs(text: str) -> list[str]:
    """The paragraphs of a text, separated by blank lines."""
    return [part.strip() for part in re.split(r"\n\s*\n", text) if part.strip()]
