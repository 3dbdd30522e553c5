"""Write the codes of appended tokens: those of full blocks, and those of the open block.

The open block contains the last tokens, which do not fill a block. It comes after the full blocks
and is encoded again when tokens are added to it.
"""

from __future__ import annotations

from torch import Tensor

from kvindex.core.protocol import Codes, Contents
from kvindex_cuda.memory.code_blocks import CodeBlocks, Fill
from kvindex_cuda.memory.layout import BLOCK
from kvindex_cuda.pariskv.append.encode import Encoder


class AppendedCodes:
    """The part of a `kvindex.core.protocol.Executor` that appends call.

    codes: Full blocks, which replace the index's columns. encoder: The kernel that encodes keys, or
    None if no kernel serves the configuration.
    """

    _length: int  # length of the index

    def __init__(self, codes: CodeBlocks, encoder: Encoder | None) -> None:
        self.codes, self._layout, self._encode = codes, codes.layout, encoder
        self._opened: object = None  # codes or keys of the open block

    @property
    def encodes(self) -> bool:
        """As `Executor.encodes`."""
        return self._encode is not None

    @property
    def searches_at_once(self) -> bool:
        """As `Executor.searches_at_once`: False, since searches write to shared buffers."""
        return False

    @property
    def appends_async(self) -> bool:
        """As `Executor.appends_async`."""
        return self.encodes

    def prepare(
        self, keys: Tensor, valid: Tensor | None, *, beyond: int, wrong: Tensor | None = None
    ) -> Fill:
        """As `Executor.prepare`. Raises RuntimeError unless it `encodes`."""
        encode, held = self._encode, len(self.codes)
        if encode is None:
            raise RuntimeError("prepare: got codes that no kernel writes, allowed if it `encodes`")

        def write(table: Tensor) -> None:
            opened, self._opened = self._opened, None  # the new codes overwrite it
            try:
                encode(keys, table, first=held // BLOCK, valid=valid, wrong=wrong)
            except Exception:  # nothing was launched
                self._opened = opened
                raise

        fill = Fill(keys.shape[0], keys.shape[2], write, self._length > held, beyond)
        self.codes.reserve(fill)
        self.codes.write(fill)  # after the last token, where nothing is read
        return fill

    def encoded(self, keys: Tensor, valid: Tensor | None) -> Codes | None:
        """As `Executor.encoded`: None, since kernels write codes to their final place."""
        return None

    def discard(self) -> None:
        """As `Executor.discard`."""
        self.codes.forget()

    def _put_open(self, contents: Contents) -> None:
        """Write the codes of the open block if it has changed."""
        start, opened = len(self.codes), contents.opened
        if start == contents.length or opened is self._opened:
            return
        self.codes.reserve_open(len(contents.counts))
        if self._encode:
            valid = None if contents.valid is None else contents.valid[:, start:]
            self._encode(opened["open_keys"], self.codes.table, first=start // BLOCK, valid=valid)
        else:
            self.codes.put_open(opened)
        self._opened = opened
