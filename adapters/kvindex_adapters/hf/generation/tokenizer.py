"""Find a tokenizer's sentence-ending tokens, for indexes that split the text into sentences
(`sentencekv`)."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import kvindex
from kvindex.core.config import parse_spec
from kvindex_adapters.common.layer_options import IndexFactory

ENDS = ".!?…。！？؟।\n"
"""Characters that end a sentence. The newline is included for code and lists, which have little
punctuation."""

CLOSES = "\"'”’»)]"
"""Closing quotes and brackets, which may follow the end of a sentence and still belong to the
sentence."""


def sentence_ends(tokenizer: Any) -> tuple[int, ...]:
    """List the token ids that end a sentence.

    A token ends a sentence if its text ends with one of the characters `.!?…。！？؟।` or a newline,
    possibly followed by spaces, closing quotes or closing brackets. Special tokens do not count.

    Args:
        tokenizer: A tokenizer of transformers.

    Returns:
        Token ids in ascending order.
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
    """Set the index option `punctuation` to the tokenizer's sentence-ending tokens.

    This applies only if the index has this option and the caller has not set it.

    Args:
        index: Name of an index, possibly with options. A function that makes an index gets no
            option.
        tokenizer: The model's tokenizer.
        attach_options: Keyword arguments of `attach` from the caller.

    Returns:
        Keyword arguments of `attach`, with the added option.
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
