"""The settings that all results of a comparison share, and the plan that lists what to measure."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvindex.core import check
from kvindex_adapters.evaluate.compare.records import Key, Record, automatic
from kvindex_adapters.evaluate.output_files import write_json


@dataclass(frozen=True)
class Settings:
    """Settings of a comparison. All results in a folder have the same settings.

    Args:
        model: Name of the model's file or folder.
        text: Name and hash of the text on which predictions are compared.
        lora: Name of the file with a LoRA adapter, or None.
        dtype: Data type in which the model computes.
        device: Device on which the model runs.
        steps: Number of tokens of the text at which predictions are compared. With 0, only answers
            to tasks are measured.
        regions: Sizes of the sink, the local window and so on, as keyword arguments of `attach`.
            With `prefill="sparse"`, each index reads the prompts itself, with sparse attention.
        store: Memory that stores keys and values ("device", "host" or "auto"), unless the options
            of an index set it. None for the default of the device.
        suite: Name of the suite whose cells are measured, or None for a usual comparison.
    """

    model: str
    text: str
    lora: str | None = None
    dtype: str = "float32"
    device: str = "cpu"
    steps: int = 256
    regions: Mapping[str, Any] = field(default_factory=dict)
    store: str | None = None
    suite: str | None = None

    def claim(self, folder: Path) -> None:
        """Store these settings in a folder, or check that the folder contains the same settings.

        Raises:
            ValueError: The folder contains results with other settings.
            OSError: The folder cannot be created.
        """
        path, own = folder / "settings.json", dataclasses.asdict(self)
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise OSError(
                f"out: got {str(folder)!r}, allowed is a folder that exists or can be created "
                f"({error.strerror})"
            ) from error
        if not path.exists():
            write_json(path, own, indent=2)
            return
        stored = json.loads(path.read_text(encoding="utf-8"))
        for name, before in {"suite": None, **stored}.items():  # older folders name no suite
            if own.get(name) != before:
                raise ValueError(
                    f"{name}: got {own.get(name)!r}, but the results in {str(folder)!r} were "
                    f"measured with {before!r}; pass that value or another --out"
                )


@dataclass(frozen=True)
class Plan:
    """The measurements of a comparison. A later plan can add measurements to the same folder.

    Args:
        indexes: Names and options of indexes and wrappers, as `name:option=value+wrapper`.
        ks: Numbers of tokens that a decode step retrieves per KV head, or texts (see
            `records.automatic`).
        tasks: Names of tasks.
        tokens: Lengths of prompts in tokens.
        tries: Number of prompts of each task and length. Their seeds are 0 to `tries - 1`.

    Raises:
        ValueError: A list is empty or contains a value twice, or a number is below 1.
    """

    indexes: tuple[str, ...]
    ks: tuple[int | str, ...]
    tasks: tuple[str, ...]
    tokens: tuple[int, ...]
    tries: int

    @property
    def texts(self) -> tuple[str | None, ...]:
        """Names of the texts to measure. None stands for the one text of a usual comparison."""
        return (None,)

    def pairs(self, tokens: int) -> list[tuple[str, int | str]]:
        """Return the indexes to measure at a prompt length, each with `k`.

        Pairs of the same index are adjacent.
        """
        return [(index, k) for index in self.indexes for k in self.ks_of(index)]

    def ks_of(self, index: str) -> tuple[int | str, ...]:
        """Return the values of `k` with which an index is measured.

        As a baseline of other indexes, exact search is measured with the numbers alone.
        """
        numbers = tuple(k for k in self.ks if not isinstance(k, str))
        baseline = index == "exact" and len(self.indexes) > 1 and len(numbers) > 0
        return numbers if baseline else self.ks

    def about(self, key: Key) -> Record:
        """Return further fields to store with the result `key`."""
        return {}

    def failed(self, keys: Sequence[Key], words: str) -> Iterator[tuple[Key, Record]]:
        """Yield what to store if an index fails before the results `keys` are measured.

        Args:
            keys: The missing results of the index on one text or prompt, at least one.
            words: The error message.
        """
        yield keys[0].failure, {"words": words}

    def retries(self, key: Key) -> bool:
        """Return True if the next run repeats a measurement that has failed, or was skipped."""
        return key.index in (None, *self.indexes)

    def __post_init__(self) -> None:
        check.at_least("tries", self.tries, 1)
        lists: dict[str, tuple[Any, ...]] = dict(index=self.indexes, k=self.ks, tokens=self.tokens)
        for name, values in {**lists, "tasks": self.tasks}.items():
            if len(set(values)) < len(values):
                raise ValueError(
                    f"{name}: got {list(values)}, allowed is a list without repeated values"
                )
        for name, values in lists.items():
            if not values:
                raise ValueError(f"{name}: got no value, allowed is one value or more")
        for name in ("k", "tokens"):
            for value in lists[name]:
                if not (name == "k" and automatic(value)):
                    check.at_least(name, value, 1)
