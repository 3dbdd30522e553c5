"""What a comparison is of: settings that all its results share, and a plan, which may grow."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvindex.core import check
from kvindex_adapters.evaluate.output_files import write_json


@dataclass(frozen=True)
class Settings:
    """What cannot change while a folder of results grows.

    model, lora: names of files; dtype, device: as `load_model.load` takes them; text: name and hash
    of what next tokens are compared on; steps: tokens of it where they are, 0 for answers alone;
    regions: sizes as `attach` takes them; store: where rows lie, unless an index's line says it;
    None for what is usual on the device.
    """

    model: str
    text: str
    lora: str | None = None
    dtype: str = "float32"
    device: str = "cpu"
    steps: int = 256
    regions: Mapping[str, int] = field(default_factory=dict)
    store: str | None = None

    def claim(self, folder: Path) -> None:
        """Make the folder one of these settings.

        Raises ValueError where it is one of others, OSError where it cannot be made.
        """
        path, own = folder / "settings.json", dataclasses.asdict(self)
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise OSError(
                f"out: got {str(folder)!r}, allowed is a folder that exists or can be made "
                f"({error.strerror})"
            ) from error
        if not path.exists():
            write_json(path, own, indent=2)
            return
        for name, before in json.loads(path.read_text(encoding="utf-8")).items():
            if own.get(name) != before:
                raise ValueError(
                    f"{name}: got {own.get(name)!r}, allowed is {before!r}, with which the results "
                    f"in {str(folder)!r} were begun, or another --out"
                )


@dataclass(frozen=True)
class Plan:
    """What is compared; a folder may get more of each.

    indexes: lines `name:option=value+wrapper`; ks: rows that a step retrieves; tasks: names;
    tokens: lengths of a prompt; tries: instances of each task and length, by seeds from 0 on.
    Raises ValueError for an empty or repeated entry, or a number below 1.
    """

    indexes: tuple[str, ...]
    ks: tuple[int, ...]
    tasks: tuple[str, ...]
    tokens: tuple[int, ...]
    tries: int

    def __post_init__(self) -> None:
        check.at_least("tries", self.tries, 1)
        lists: dict[str, tuple[Any, ...]] = dict(index=self.indexes, k=self.ks, tokens=self.tokens)
        for name, values in {**lists, "tasks": self.tasks}.items():
            if len(set(values)) < len(values):
                raise ValueError(f"{name}: got {list(values)}, allowed is each once")
        for name, values in lists.items():
            if not values:
                raise ValueError(f"{name}: got none, allowed is one or more")
        for name in ("k", "tokens"):
            for value in lists[name]:
                check.at_least(name, value, 1)
