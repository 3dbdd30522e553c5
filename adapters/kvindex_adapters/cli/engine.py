"""Which engine answers: the minimal decoder, or transformers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, NamedTuple

from kvindex.core import check
from kvindex_adapters.cli.documents import CacheDocument, Document, SessionDocument
from kvindex_adapters.cli.progress import console
from kvindex_adapters.decoder import Decoder, sampling_like
from kvindex_adapters.decoder.quantized import PLAIN, check_weights
from kvindex_adapters.hf.generate import ONE_ANSWER, Generation, generate
from kvindex_adapters.llama.heads import HeadRanks

ENGINES = ("decoder", "transformers")
"""Values of `--engine`."""


class Engine(NamedTuple):
    """What answers: its name, and a function of a prompt and the options of `kvhf.generate`.

    opened: gives an empty document, from whether prompts are branches of it, index, k and
    the options of `attach`; longest: tokens of the longest text that the model was made for, or
    None where its configuration does not say.
    """

    name: str
    generate: Callable[..., Generation]
    opened: Callable[..., AbstractContextManager[Document]]
    longest: int | None = None


def check_engine(
    engine: str | None, weights: str = PLAIN, *, keeps_cache: bool = False
) -> str | None:
    """The engine, which the weights may decide: of others than plain ones it is the decoder.

    weights: as of `Decoder.of`; keeps_cache: whether one is saved or loaded. Raises ValueError for
    an engine that there is not, or that does not do what is asked.
    """
    if engine is not None:
        check.one_of("engine", engine, ENGINES)
    check_weights(weights)
    if weights != PLAIN and engine == "transformers":
        raise ValueError(f"weights: got {weights!r} with transformers, allowed is {PLAIN!r}")
    if weights != PLAIN and keeps_cache:
        raise ValueError(
            f"weights: got {weights!r} with --save-cache or --load-cache, allowed is {PLAIN!r}: "
            "rows of other weights are of another model"
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
    """The engine of a loaded model: unless one is named, the decoder on a GPU where it can.

    options: as of `model.generate`; weights: as of `check_engine`; ranks: of the decoder, as of
    `Decoder.of`. Raises ValueError where the decoder was asked for and cannot.
    """
    opened = partial(CacheDocument.opened, model, tokenizer)
    sizes = model.config.get_text_config(decoder=True).to_dict()
    longest = sizes.get("max_position_embeddings")
    other = Engine("transformers", partial(generate, model, tokenizer, **options), opened, longest)
    usual = "decoder" if model.device.type == "cuda" else "transformers"
    if (engine or usual) == "transformers":
        return other
    try:
        given = {**model.generation_config.to_dict(), **ONE_ANSWER, **options}
        sampling = sampling_like(given, seed)
        decoder = Decoder.of(model, tokenizer, weights=weights, ranks=ranks)
    except ValueError as error:
        if engine is not None:
            raise ValueError(f"engine: got 'decoder', which does not do it: {error}") from None
        console.print(f"transformers runs the model, not the decoder: {error}", markup=False)
        return other
    opened = partial(SessionDocument.opened, decoder)
    return Engine("decoder", partial(decoder.generate, sampling=sampling), opened, longest)
