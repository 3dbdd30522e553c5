"""The folder of a saved chat, without imports of torch, so that commands can check it at once."""

from __future__ import annotations

import os
from pathlib import Path

CHAT, CACHE = "chat.json", "cache"
"""Names inside a saved folder: the file of the messages, and the folder of the cache."""


def check_saved_chat(folder: str | os.PathLike[str], name: str = "folder") -> None:
    """Raise FileNotFoundError if a folder contains no saved chat.

    Args:
        folder: The folder.
        name: Name of the argument, for the error message.
    """
    path = Path(folder)
    if not (path / CHAT).is_file():
        reason = f"has no file {CHAT}" if path.exists() else "does not exist"
        raise FileNotFoundError(
            f"{name}: got {str(folder)!r}, which {reason}; allowed is a folder that save() of a "
            "chat, or /save in the command kvindex chat, has written"
        )
