"""Write the codes of appended tokens to blocks of 256 tokens.

If the last block is only partly filled (an open block), it is stored after the full blocks, and is
encoded again each time tokens are added to it.
"""

from __future__ import annotations

from torch import Tensor

from kvindex.core.protocol import Codes, Contents
from kvindex_cuda.memory.code_blocks import CodeBlocks, Fill
from kvindex_cuda.memory.layout import BLOCK
from kvindex_cuda.pariskv.append.encode import Encoder


class AppendedCodes:
    """Base class of the executor with the methods that encode appended tokens
    (`kvindex.core.protocol.Executor`).

    codes: Storage of the codes of full blocks.
    encoder: Launches the kernel that encodes keys; None if no kernel supports the configuration.
    """

    _length: int  # length of the index

    def __init__(self, codes: CodeBlocks, encoder: Encoder | None) -> None:
        self.codes, self._layout, self._encode = codes, codes.layout, encoder
        self._opened: object = None  # codes or keys of the open block that were last written

    @property
    def encodes(self) -> bool:
        """True if a kernel encodes keys. Otherwise the index encodes them with a sequence of
        separate operations."""
        return self._encode is not None

    @property
    def searches_at_once(self) -> bool:
        """False: only one thread may search at a time, because all searches write to the same
        buffers."""
        return False

    @property
    def checks_tokens(self) -> bool:
        """False: a decode step does not check its query and key on the host. Kernels check them
        and set a flag instead (see `Executor.checks_tokens`)."""
        return False

    @property
    def appends_async(self) -> bool:
        """True if searches may run on another stream while `prepare` encodes new tokens."""
        return self.encodes

    def prepare(
        self, keys: Tensor, valid: Tensor | None, *, beyond: int, wrong: Tensor | None = None
    ) -> Fill:
        """Encode whole blocks of keys, and return the codes for `codes.append`
        (`Executor.prepare`).

        Raises RuntimeError if `encodes` is False.
        """
        encode, held = self._encode, len(self.codes)
        if encode is None:
            raise RuntimeError(
                "prepare: no kernel encodes these keys; call it only if `encodes` is True"
            )

        def write(table: Tensor) -> None:
            opened, self._opened = self._opened, None  # new codes overwrite the open block
            try:
                encode(keys, table, first=held // BLOCK, valid=valid, wrong=wrong)
            except Exception:  # no kernel was launched
                self._opened = opened
                raise

        fill = Fill(keys.shape[0], keys.shape[2], write, self._length > held, beyond)
        self.codes.reserve(fill)
        self.codes.write(fill)  # beyond the last token, which no kernel reads
        return fill

    def encoded(self, keys: Tensor, valid: Tensor | None) -> Codes | None:
        """Return None, because kernels write codes directly to the blocks that store them."""
        return None

    def discard(self) -> None:
        """Discard the codes that `prepare` has written. They will not be appended."""
        self.codes.forget()

    def _put_open(self, contents: Contents) -> None:
        """Write the codes of the open block (the last, partly filled block) if it has changed."""
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
