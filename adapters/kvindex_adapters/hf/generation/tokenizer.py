"""Tokens that end a sentence, from a tokenizer: for indexes that read the text (`sentencekv`)."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import kvindex
from kvindex.core.config import parse_spec
from kvindex_adapters.common.layer_options import IndexFactory

ENDS = ".!?…。！？؟।\n"
"""Characters that end a sentence; a new line for texts without stops (code, lists)."""

CLOSES = "\"'”’»)]"
"""Characters that may follow a stop and still belong to the sentence."""


def sentence_ends(tokenizer: Any) -> tuple[int, ...]:
    """Ids of the tokens after which a sentence is over, ascending.

    Those whose text, without spaces and closing marks after it, ends with one of `ENDS`.
    """
    ids = range(len(tokenizer))
    texts = tokenizer.batch_decode([[i] for i in ids], clean_up_tokenization_spaces=False)
    special = set(tokenizer.all_special_ids)
    stripped = (text.rstrip(" " + CLOSES) for text in texts)
    pairs = zip(ids, stripped, strict=True)
    return tuple(i for i, text in pairs if text.endswith(tuple(ENDS)) and i not in special)


def punctuated(
    index: str | IndexFactory,
    tokenizer: Any,
    attach_options: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """`attach_options`, with `punctuation` for an index that has such an option and no value.

    index: as `attach` takes it; a factory knows itself what it wants.
    """
    options = dict(attach_options or {})
    if not isinstance(index, str):
        return options
    name, named = parse_spec(index.partition("+")[0])
    more = dict(options.get("index_options") or {})
    fields = {field.name for field in dataclasses.fields(kvindex.get(name).Config)}
    if "punctuation" in fields - named.keys() - more.keys():
        options["index_options"] = {**more, "punctuation": sentence_ends(tokenizer)}
    return options
