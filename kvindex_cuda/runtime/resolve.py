"""Launch kernels whose arguments are found by name, so that Python code does not list them.

A `NamedLaunch` looks up the name of each parameter of a kernel among the attributes of some objects
(namespaces), for example the buffers of a decode step and the state of a layer. For a new parameter
of a kernel, it is enough to add an attribute of that name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from operator import attrgetter
from typing import Any

from kvindex_cuda.runtime.launch import Argument, Grid, run, signature_of


class NamedLaunch:
    """Launches a kernel whose arguments are attributes of some objects. For each parameter of the
    kernel, exactly one of the objects must have an attribute of the same name.

    Args:
        file: Path of the source below `kernels/`.
        kernel: Name of the function in it.
        *namespaces: Objects, or the classes of objects, that each call passes in this order. The
            constructor only reads the names of their attributes, and keeps no reference to the
            objects.
        given: Names of parameters that each call passes by keyword instead.
        **renamed: Attribute name for each parameter whose attribute has a different name.

    Raises:
        ValueError: No namespace, or more than one, has an attribute for a parameter; or a name in
            `given` or `renamed` is not a parameter of the kernel.
    """

    def __init__(
        self, file: str, kernel: str, *namespaces: object, given: Sequence[str] = (), **renamed: str
    ) -> None:
        takes = signature_of(file, kernel)
        if unknown := {*given, *renamed} - {*takes.names}:
            raise ValueError(
                f"{kernel}: got {sorted(unknown)}, allowed are its parameters {[*takes.names]}"
            )
        known = [_attributes(namespace) for namespace in namespaces]
        found: list[list[str]] = [[] for _ in namespaces]
        places: dict[str, tuple[int, int]] = {}  # parameter -> (namespace, place in `found`)
        for name in takes.names:
            if name in given:
                continue
            attribute = renamed.get(name, name)
            owners = [i for i, names in enumerate(known) if attribute in names]
            if len(owners) != 1:
                classes = " and ".join(_called(namespaces[i]) for i in owners or range(len(known)))
                count = "several attributes" if owners else "no attribute"
                raise ValueError(
                    f"{kernel}.{name}: got {count} {attribute!r} in {classes}, allowed is exactly "
                    "one attribute of this name"
                )
            places[name] = owners[0], len(found[owners[0]])
            found[owners[0]].append(attribute)
        starts = [sum(map(len, found[:i])) for i in range(len(found) + 1)]
        places |= {name: (len(found), i) for i, name in enumerate(given)}
        self._order = [starts[i] + place for i, place in (places[name] for name in takes.names)]
        self._file, self._takes, self._given = file, takes, tuple(given)
        self._readers = [_reader(names) for names in found]

    def __call__(
        self,
        *namespaces: object,
        grid: Grid,
        block: Grid,
        defines: Mapping[str, int],
        shared_bytes: int = 0,
        overlap: bool = False,
        **given: Argument,
    ) -> None:
        """Launch the kernel. The arguments are read from the attributes of the objects in
        `namespaces`.

        Arguments that the constructor names in `given` are passed by keyword. All other parameters,
        and the exceptions, are those of `launch.launch`.
        """
        values: list[Argument] = []
        for read, namespace in zip(self._readers, namespaces, strict=True):
            values += read(namespace)
        if given.keys() != {*self._given}:
            raise ValueError(
                f"{self._takes.kernel}: got keyword arguments {sorted(given)}, allowed are "
                f"{[*self._given]}"
            )
        values += [given[name] for name in self._given]
        run(
            self._file,
            self._takes,
            [values[i] for i in self._order],
            grid,
            block,
            shared_bytes,
            overlap,
            tuple(defines.items()),
        )


def _attributes(namespace: object) -> set[str]:
    """Return the names of an object's attributes. For a class, also return the names of its
    dataclass fields."""
    more = {field.name for field in fields(namespace)} if is_dataclass(namespace) else set()
    return {*dir(namespace), *more}


def _called(namespace: object) -> str:
    kind = namespace if isinstance(namespace, type) else type(namespace)
    return kind.__name__


def _reader(names: Sequence[str]) -> Callable[[object], Sequence[Any]]:
    """Return a function that reads the attributes `names` of an object, in this order."""
    if not names:
        return lambda namespace: ()
    read = attrgetter(*names)
    return read if len(names) > 1 else lambda namespace: (read(namespace),)
