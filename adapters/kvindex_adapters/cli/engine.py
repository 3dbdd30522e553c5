"""Which engine answers: the minimal decoder, or transformers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, NamedTuple

from kvindex_adapters.cli.documents import CacheDocument, Document, SessionDocument
from kvindex_adapters.cli.progress import console
from kvindex_adapters.decoder import Decoder, sampling_like
from kvindex_adapters.hf.generate import ONE_ANSWER, Generation, generate

ENGINES = ("decoder", "transformers")
"""Values of `--engine`."""


class Engine(NamedTuple):
    """What answers: its name, and a function of a prompt and the options of `kvhf.generate`.

    opened: gives an empty document, from whether prompts are branches of it, index, k and regions.
    """

    name: str
    generate: Callable[..., Generation]
    opened: Callable[..., AbstractContextManager[Document]]


def choose(
    engine: str | None,
    model: Any,
    tokenizer: Any,
    options: Mapping[str, Any],
    seed: int,
) -> Engine:
    """The engine of a loaded model: unless one is named, the decoder on a GPU where it can.

    options: as of `model.generate`. Raises ValueError where the decoder was asked for and cannot.
    """
    opened = partial(CacheDocument.opened, model, tokenizer)
    other = Engine("transformers", partial(generate, model, tokenizer, **options), opened)
    usual = "decoder" if model.device.type == "cuda" else "transformers"
    if (engine or usual) == "transformers":
        return other
    try:
        given = {**model.generation_config.to_dict(), **ONE_ANSWER, **options}
        sampling = sampling_like(given, seed)
        decoder = Decoder.of(model, tokenizer)
    except ValueError as error:
        if engine is not None:
            raise ValueError(f"engine: got 'decoder', which does not do it: {error}") from None
        console.print(f"transformers runs the model, not the decoder: {error}", markup=False)
        return other
    opened = partial(SessionDocument.opened, decoder)
    return Engine("decoder", partial(decoder.generate, sampling=sampling), opened)
