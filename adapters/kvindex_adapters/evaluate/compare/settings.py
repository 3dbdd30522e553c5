"""The settings that all results of a comparison share, and its plan, which may be extended."""

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
    """Settings that are equal for all results in a folder.

    Args:
        model: Name of the model's file or folder.
        text: Name and hash of the text for comparing predictions.
        lora: Name of the LoRA file, or None.
        dtype: As in `load_model.load`.
        device: As in `load_model.load`.
        steps: Tokens of the text for comparing predictions, or 0 to measure only answers.
        regions: Sizes of the regions, as keywords of `attach`.
        store: Where rows are stored, unless an index's options set it; None for the device's
            default.
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
        """Store these settings in a new folder, or check that the folder has the same settings.

        Raises:
            ValueError: The folder has results of other settings.
            OSError: The folder cannot be created.
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
                    f"{name}: got {own.get(name)!r}, allowed is {before!r}, the setting of the "
                    f"results in {str(folder)!r}, or another --out"
                )


@dataclass(frozen=True)
class Plan:
    """The measurements to run. A later plan can add more measurements to the same folder.

    Args:
        indexes: Names and options of indexes and wrappers, as `name:option=value+wrapper`.
        ks: Numbers of rows that a step retrieves per KV head.
        tasks: Names of tasks.
        tokens: Lengths of prompts.
        tries: Number of instances of each task and length. Their seeds begin at 0.

    Raises:
        ValueError: A list is empty or repeats an entry, or a number is below 1.
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
