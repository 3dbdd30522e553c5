"""Compile copies of CUDA kernels that record the time at certain lines of their source.

Thread 0 of each block reads the time from the register %globaltimer and stores it. A stored time is
called a stamp. A place in the source at which a stamp is stored is called a point. These are the
points:

- at the start of the kernel, and at its end, wherever a block returns;
- after each line that waits or signals: `after_previous();`, `let_next_begin();`, `await(…);`,
  `tell(…);` or `__syncthreads();`, also if an `if` or `else` precedes it on the same line;
- after each line that ends in `// MARK`, which must follow a whole statement or a brace.

Points can also be in functions that the same file defines before the kernel, but not in headers. If
a block reaches a point several times, its last time is recorded.
"""

from __future__ import annotations

import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from kvindex_cuda.runtime import launch as launching

BLOCKS = 4096
"""Largest number of blocks per kernel that store times. Later blocks store nothing."""

HEAD = r"__global__\s+void\s+(?:__launch_bounds__\((?:[^()]|\([^()]*\))*\)\s*)?%s\("
COMMENT = re.compile(r"//[^\n]*")
WAIT = re.compile(
    r"^(?P<before>\s*(?:\} )?(?:else )?(?:if \(.*\) )?)"
    r"(?P<call>(?:after_previous|let_next_begin|__syncthreads)\(\)|(?:await|tell)\([^;]*\));"
    r"(?P<rest>\s*(?://.*)?)$"
)
MARK = re.compile(r"^(?P<code>.*?)\s*//\s*MARK\s*$")

PROLOGUE = """
namespace timeline {{
__device__ __forceinline__ void stamp(int point) {{
    if (threadIdx.x) return;
    unsigned long long now, block = gridDim.y * blockIdx.z + blockIdx.y;
    block = block * gridDim.x + blockIdx.x;
#ifdef EMULATED
    now = emulator::globaltimer();
#else
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now) :: "memory");
#endif
    auto marks = reinterpret_cast<unsigned long long*>((unsigned long long)(STAMPED_AT));
    if (block < {blocks}) marks[point * {blocks} + block] = now;
}}
template <int POINT>
struct Leaving {{
    __device__ __forceinline__ ~Leaving() {{ stamp(POINT); }}
}};
}}
#line 1 "{file}"
"""


@dataclass(frozen=True)
class Point:
    """A place in the source of a kernel at which the kernel stores the time.

    Args:
        kernel: Name of the kernel.
        line: Number of the line.
        what: "start", "end", or the text of the line.
    """

    kernel: str
    line: int
    what: str


def stamped(
    text: str, kernels: list[str], *, file: str, first: int = 0
) -> tuple[str, dict[int, Point]]:
    """Change CUDA source so that its kernels store the time at certain points.

    The changes do not add lines, so line numbers stay the same. The module's docstring says where
    the points are. Points are numbered.

    Args:
        text: The source.
        kernels: Names of the kernels to change.
        file: Name of the source file, for error messages.
        first: Number of the first point.

    Returns:
        The new source, and a dict: number of a point -> the point.

    Raises:
        ValueError: A `// MARK` is in the middle of a statement, or the source has no such kernel.
    """
    points: dict[int, Point] = {}

    def new(kernel: str, line: int, what: str) -> int:
        points[first + len(points)] = Point(kernel, line, what[:70])
        return first + len(points) - 1

    bodies = {name: _body(text, name, file) for name in kernels}
    lines_of = {
        name: tuple(1 + text.count("\n", 0, at) for at in ends) for name, ends in bodies.items()
    }
    for name, (opened, _) in sorted(bodies.items(), key=lambda body: -body[1][0]):
        begin, end = (new(name, lines_of[name][i], ("start", "end")[i]) for i in range(2))
        stamps = f" timeline::stamp({begin}); timeline::Leaving<{end}> leaving_;"
        text = text[: opened + 1] + stamps + text[opened + 1 :]
    lines = text.split("\n")
    for number, line in enumerate(lines, 1):
        inside = [name for name, (start, stop) in lines_of.items() if start < number < stop]
        if inside and (wait := WAIT.match(line)):
            point = new(inside[0], number, line.strip())
            call = f"{{ {wait['call']}; timeline::stamp({point}); }}"
            lines[number - 1] = wait["before"] + call + wait["rest"]
        elif mark := MARK.match(line):
            code = mark["code"].rstrip()
            if code and not code.endswith((";", "{", "}")):
                allowed = "// MARK after a whole statement or after a brace"
                raise ValueError(f"{file}:{number}: got {line.strip()!r}, allowed is {allowed}")
            point = new((inside or kernels)[0], number, code.strip() or "MARK")
            lines[number - 1] = f"{code} timeline::stamp({point});"
    return "\n".join(lines), points


def _body(text: str, kernel: str, file: str) -> tuple[int, int]:
    """Return the positions of the braces that enclose the body of a kernel."""
    plain = COMMENT.sub(lambda found: " " * len(found[0]), text)
    head = re.search(HEAD % kernel, plain)
    if head is None:
        raise ValueError(f"{file}: got a source without a kernel named {kernel!r}")
    start = plain.index("{", _closing(plain, head.end() - 1))
    return start, _closing(plain, start)


def _closing(text: str, opened: int) -> int:
    """Return the position of the bracket that closes the bracket at position `opened`."""
    depth, one = 0, text[opened]
    other = {"(": ")", "{": "}"}[one]
    for at in range(opened, len(text)):
        depth += (text[at] == one) - (text[at] == other)
        if not depth:
            return at
    raise ValueError(f"source: got a bracket {one} at position {opened} that is never closed")


@contextmanager
def launched() -> Iterator[dict[str, str]]:
    """Record which kernels are launched in a `with` block.

    Yields:
        Name of a kernel -> source file, in the order in which the kernels are first launched.
    """
    found: dict[str, str] = {}
    before = dict(launching.LOADERS)

    def loading(loader: launching.Loader, file: str, name: str, defines: Any) -> launching.Launch:
        found.setdefault(name, file)
        return loader(file, name, defines)

    launching.LOADERS.update({kind: partial(loading, loader) for kind, loader in before.items()})
    try:
        yield found
    finally:
        launching.LOADERS.update(before)


class Stamped:
    """A context in which kernels record the times at which they reach certain lines.

    In the context, kernels are compiled from a source that `stamped` has changed: each block of a
    kernel stores the time when it reaches one of these lines. Such a line is called a point, and
    each point has a number.

    Args:
        kernels: Name of a kernel -> source file, from `launched`.
        device: Device on which the times are stored.

    Attributes:
        points: Number of a point -> the kernel and the line where the time is stored.
        marks: Time in nanoseconds at which each block reached each point, int64 `[points, BLOCKS]`.
            It is 0 where no time was stored.
    """

    def __init__(self, kernels: dict[str, str], device: torch.device | str) -> None:
        self.points: dict[int, Point] = {}
        self._texts: dict[str, str] = {}
        for file in dict.fromkeys(kernels.values()):
            inside = [name for name, its in kernels.items() if its == file]
            source, first = launching.source(file), len(self.points)
            self._texts[file], points = stamped(source, inside, file=file, first=first)
            self.points |= points
        shape = max(len(self.points), 1), BLOCKS
        self.marks = torch.zeros(shape, dtype=torch.int64, device=device)

    def __enter__(self) -> Stamped:
        self._sources, self._loaders = launching.SOURCES, dict(launching.LOADERS)
        self._folder = tempfile.TemporaryDirectory()
        folder = Path(self._folder.name) / "kernels"
        shutil.copytree(self._sources, folder)
        for file, text in self._texts.items():
            (folder / file).write_text(
                PROLOGUE.format(blocks=BLOCKS, file=file) + text, encoding="utf-8"
            )
        launching.SOURCES = folder
        for kind, loader in self._loaders.items():
            launching.LOADERS[kind] = partial(self._load, loader)
        return self

    def __exit__(self, *_: object) -> None:
        launching.SOURCES = self._sources
        launching.LOADERS.update(self._loaders)
        self._folder.cleanup()

    def _load(self, loader: launching.Loader, file: str, name: str, defines: Any) -> Any:
        more = (("STAMPED_AT", self.marks.data_ptr()),) if file in self._texts else ()
        return loader(file, name, defines + more)  # the extra define forces a new compilation
