"""Read a kernel's parameters from its source: their names, their types, and their positions in
memory.

A kernel has either up to six parameters, or one parameter that is a struct. In both cases arguments
are passed by name from Python, and only the source defines their order and types.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
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
"""C types other than pointers -> format character of `struct`, and Python type of the argument."""

BOUNDS = r"(?:__launch_bounds__\((?:[^()]|\([^()]*\))*\)\s*)?"
STRUCT = re.compile(r"const __grid_constant__ (\w+) \w+")
DECLARATION = re.compile(r"(?:const )?([\w ]+?) ?(\*?) ?(?:__restrict__ )?(\w+(?:, \w+)*)")


@dataclass(frozen=True)
class Signature:
    """The parameters of a kernel.

    Attributes:
        kernel: Name of the kernel.
        fields: Name and Python type of each parameter: a Tensor (or None) for a pointer, else an
            int or a float.
        formats: Format character of `struct` for each parameter.
        by_value: Name of the struct that contains the parameters, or None if they are passed
            separately.
    """

    kernel: str
    fields: tuple[tuple[str, type], ...]
    formats: str
    by_value: str | None

    @cached_property
    def packing(self) -> Struct:
        """Format of all fields for the module `struct`. As in C, each field begins at a multiple of
        its size."""
        return Struct(f"@{self.formats}0q" if self.by_value else f"@{self.formats}")

    @cached_property
    def places(self) -> tuple[int, ...]:
        """Offset of each field in the memory of the parameters, in bytes."""
        ends = [calcsize("@" + self.formats[: i + 1]) for i in range(len(self.formats))]
        return tuple(e - calcsize(kind) for e, kind in zip(ends, self.formats, strict=True))

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Names of the kernel's parameters, in order."""
        return tuple(name for name, _ in self.fields)

    @cached_property
    def pointers(self) -> tuple[int, ...]:
        """Indices of the parameters that are pointers."""
        return tuple(i for i, (_, kind) in enumerate(self.fields) if kind is Tensor)

    @cached_property
    def numbers(self) -> tuple[tuple[int, type], ...]:
        """Indices of the parameters that are numbers, with their Python types."""
        return tuple((i, kind) for i, (_, kind) in enumerate(self.fields) if kind is not Tensor)

    def wrong_names(self, given: Mapping[str, Any]) -> ValueError:
        """Return the ValueError for arguments whose names are not those of the parameters."""
        names = self.names
        missing, unknown = set(names) - given.keys(), given.keys() - set(names)
        parts = [f"unknown {sorted(unknown)}"] * bool(unknown)
        parts += [f"no {sorted(missing)}"] * bool(missing)
        return ValueError(f"{self.kernel}: got {' and '.join(parts)}, allowed are {[*names]}")

    def wrong_type(self, i: int, given: Any) -> ValueError:
        """Return the ValueError for an argument whose type is not that of the kernel's parameter
        number `i`."""
        name, kind = self.fields[i]
        allowed = "a tensor or None" if kind is Tensor else kind.__name__
        got = "a tensor" if isinstance(given, Tensor) else repr(given)
        return ValueError(f"{self.kernel}.{name}: got {got}, allowed is {allowed}")


def signature(text: str, kernel: str) -> Signature:
    """Return the signature of a kernel in a source text. Raises ValueError if the text does not
    define the kernel."""
    text = re.sub(r"//[^\n]*", "", text)
    found = re.search(rf"__global__\s+void\s+{BOUNDS}{kernel}\s*\(([^)]*)\)", text)
    if found is None:
        raise ValueError(f"{kernel}: got no such kernel in its source")
    parameters, by_value = found[1], None
    if by_struct := STRUCT.fullmatch(parameters.strip()):
        by_value = by_struct[1]
        body = re.search(rf"struct {by_value} \{{(.*?)\}};", text, re.DOTALL)
        if body is None:
            raise ValueError(
                f"{kernel}: got a parameter of type {by_value}, but its source has no such struct"
            )
        declarations = body[1].split(";")
    else:
        declarations = parameters.split(",")
    fields: list[tuple[str, type]] = []
    formats = ""
    for declaration in filter(None, (" ".join(part.split()) for part in declarations)):
        parts = DECLARATION.fullmatch(declaration)
        if parts is None or not (parts[2] or parts[1] in NUMBERS):
            allowed = f"a pointer or one of {sorted(NUMBERS)}"
            raise ValueError(f"{kernel}: got a parameter {declaration!r}, allowed is {allowed}")
        kind, python = ("P", Tensor) if parts[2] else NUMBERS[parts[1]]
        names = parts[3].split(", ")
        fields += [(name, python) for name in names]
        formats += kind * len(names)
    return Signature(kernel, tuple(fields), formats, by_value)
