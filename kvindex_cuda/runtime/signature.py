"""What a kernel takes, read from its source: the arguments' names, types and places.

A kernel has up to six parameters, or one, a struct of named fields by value. Either way arguments
are given by name, and the source alone says their order and types.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from struct import Struct, calcsize
from typing import Any

from torch import Tensor

NUMBERS: dict[str, tuple[str, type]] = {
    "i64": ("q", int),
    "long long": ("q", int),
    "int": ("i", int),
    "float": ("f", float),
    "double": ("d", float),
}
"""Of a type that is no pointer: how `struct` packs it, and the Python type it is given as."""

BOUNDS = r"(?:__launch_bounds__\((?:[^()]|\([^()]*\))*\)\s*)?"
STRUCT = re.compile(r"const __grid_constant__ (\w+) \w+")
DECLARATION = re.compile(r"(?:const )?([\w ]+?) ?(\*?) ?(?:__restrict__ )?(\w+(?:, \w+)*)")


@dataclass(frozen=True)
class Signature:
    """The arguments of a kernel.

    fields: their names and what each is given as: a Tensor (or None) for a pointer, an int or a
    float; formats: a character of `struct` for each; by_value: the struct that holds them, or None
    for a parameter each.
    """

    kernel: str
    fields: tuple[tuple[str, type], ...]
    formats: str
    by_value: str | None
    packing: Struct = field(init=False, repr=False, compare=False)
    places: tuple[int, ...] = field(init=False, compare=False)

    def __post_init__(self) -> None:
        """Where C puts each field: at a multiple of its size, and so the struct's end."""
        packing = Struct(f"@{self.formats}0q" if self.by_value else f"@{self.formats}")
        ends = [calcsize("@" + self.formats[: i + 1]) for i in range(len(self.formats))]
        sizes = [calcsize(kind) for kind in self.formats]
        places = tuple(end - size for end, size in zip(ends, sizes, strict=True))
        object.__setattr__(self, "packing", packing)
        object.__setattr__(self, "places", places)

    def wrong_names(self, given: Mapping[str, Any]) -> ValueError:
        """The error for names that are not those of the fields."""
        names = [name for name, _ in self.fields]
        missing, unknown = set(names) - given.keys(), given.keys() - set(names)
        parts = [f"unknown {sorted(unknown)}"] * bool(unknown)
        parts += [f"no {sorted(missing)}"] * bool(missing)
        return ValueError(f"{self.kernel}: got {' and '.join(parts)}, allowed are {names}")

    def wrong_type(self, name: str, kind: type, given: Any) -> ValueError:
        """The error for an argument of another type than its field."""
        allowed = "a tensor or None" if kind is Tensor else f"{kind.__name__}"
        got = "a tensor" if isinstance(given, Tensor) else repr(given)
        return ValueError(f"{self.kernel}.{name}: got {got}, allowed is {allowed}")


def signature(text: str, kernel: str) -> Signature:
    """Of a kernel in a source. Raises ValueError for none of this name, or a type none has."""
    text = re.sub(r"//[^\n]*", "", text)
    found = re.search(rf"__global__\s+void\s+{BOUNDS}{kernel}\s*\(([^)]*)\)", text)
    if found is None:
        raise ValueError(f"{kernel}: got no such kernel in its source")
    parameters, by_value = found[1], None
    if by_struct := STRUCT.fullmatch(parameters.strip()):
        by_value = by_struct[1]
        body = re.search(rf"struct {by_value} \{{(.*?)\}};", text, re.DOTALL)
        if body is None:
            raise ValueError(f"{kernel}: got no struct {by_value} in its source")
        declarations = body[1].split(";")
    else:
        declarations = parameters.split(",")
    fields: list[tuple[str, type]] = []
    formats = ""
    for declaration in filter(None, (" ".join(part.split()) for part in declarations)):
        parts = DECLARATION.fullmatch(declaration)
        if parts is None or not (parts[2] or parts[1] in NUMBERS):
            allowed = f"a pointer or one of {sorted(NUMBERS)}"
            raise ValueError(f"{kernel}: got {declaration!r}, allowed is {allowed}")
        kind, python = ("P", Tensor) if parts[2] else NUMBERS[parts[1]]
        names = parts[3].split(", ")
        fields += [(name, python) for name in names]
        formats += kind * len(names)
    return Signature(kernel, tuple(fields), formats, by_value)
