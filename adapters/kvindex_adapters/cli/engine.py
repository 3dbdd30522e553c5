"""Choose the engine that answers: the minimal decoder, or transformers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, NamedTuple

from kvindex.core import check
from kvindex_adapters.cli.documents import CacheDocument, Document, SessionDocument
from kvindex_adapters.cli.progress import console
from kvindex_adapters.decoder import Chat as DecoderChat
from kvindex_adapters.decoder import Decoder, sampling_like
from kvindex_adapters.decoder.quantized import PLAIN, check_weights
from kvindex_adapters.hf.chat import BaseChat
from kvindex_adapters.hf.chat import Chat as ModelChat
from kvindex_adapters.hf.generate import ONE_ANSWER, Generation, generate
from kvindex_adapters.llama.heads import HeadRanks

ENGINES = ("decoder", "transformers")
"""Values of `--engine`."""


class Engine(NamedTuple):
    """An engine that answers prompts of one model.

    Args:
        name: One of `ENGINES`.
        generate: Function of a prompt and the options of `kvhf.generate`.
        opened: Function that opens an empty document from `branch`, `index`, `k` and
            `attach_options`.
        chat: Function that opens a chat from the keyword arguments of `kvhf.Chat`.
        longest: Maximum length of the model in tokens, or None if its configuration does not state
            it.
    """

    name: str
    generate: Callable[..., Generation]
    opened: Callable[..., AbstractContextManager[Document]]
    chat: Callable[..., BaseChat]
    longest: int | None = None


def check_engine(
    engine: str | None, weights: str = PLAIN, *, keeps_cache: bool = False
) -> str | None:
    """Return the name of the engine that the options require, or None if both are possible.

    FP8 weights require the decoder.

    Args:
        engine: Value of `--engine`, or None.
        weights: As in `Decoder.of`.
        keeps_cache: Whether a cache is saved or loaded.

    Raises:
        ValueError: There is no such engine, or it does not support the other options.
    """
    if engine is not None:
        check.one_of("engine", engine, ENGINES)
    check_weights(weights)
    if weights != PLAIN and engine == "transformers":
        raise ValueError(f"weights: got {weights!r} with transformers, allowed is {PLAIN!r}")
    if weights != PLAIN and keeps_cache:
        raise ValueError(
            f"weights: got {weights!r} with --save-cache or --load-cache, allowed is {PLAIN!r}: "
            "keys and values that other weights computed do not fit the model"
        )
    return "decoder" if weights != PLAIN else engine


def choose(
    engine: str | None,
    model: Any,
    tokenizer: Any,
    options: Mapping[str, Any],
    seed: int,
    weights: str = PLAIN,
    ranks: HeadRanks | None = None,
) -> Engine:
    """Make the engine of a loaded model.

    If no engine is named, the decoder is used on a GPU if it supports the model, otherwise
    transformers.

    Args:
        engine: One of `ENGINES`, or None.
        model: The transformers model.
        tokenizer: The model's tokenizer.
        options: Options of `model.generate`.
        seed: Seed for sampling.
        weights: As in `Decoder.of`.
        ranks: As in `Decoder.of`.

    Raises:
        ValueError: `engine` is "decoder", and the decoder does not support the model or the
            options.
    """
    opened = partial(CacheDocument.opened, model, tokenizer)
    sizes = model.config.get_text_config(decoder=True).to_dict()
    longest = sizes.get("max_position_embeddings")
    chat: Callable[..., BaseChat] = partial(ModelChat, model, tokenizer, **options)
    answer = partial(generate, model, tokenizer, **options)
    other = Engine("transformers", answer, opened, chat, longest)
    usual = "decoder" if model.device.type == "cuda" else "transformers"
    if (engine or usual) == "transformers":
        return other
    try:
        given = {**model.generation_config.to_dict(), **ONE_ANSWER, **options}
        sampling = sampling_like(given, seed)
        decoder = Decoder.of(model, tokenizer, weights=weights, ranks=ranks)
    except ValueError as error:
        if engine is not None:
            raise ValueError(f"engine: got 'decoder', which cannot run this: {error}") from None
        console.print(f"using transformers instead of the decoder: {error}", markup=False)
        return other
    opened = partial(SessionDocument.opened, decoder)
    chat = partial(DecoderChat, decoder, sampling=sampling)
    return Engine("decoder", partial(decoder.generate, sampling=sampling), opened, chat, longest)
