"""Choose the engine that runs the model: kvindex's own decoder, or transformers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, NamedTuple

from kvindex.core import check
from kvindex_adapters.cli.documents import CacheDocument, Document, SessionDocument
from kvindex_adapters.cli.early import ENGINES
from kvindex_adapters.cli.progress import console
from kvindex_adapters.common.speculation import check_vocabularies
from kvindex_adapters.decoder import Chat as DecoderChat
from kvindex_adapters.decoder import Decoder, sampling_like
from kvindex_adapters.decoder.quantized import PLAIN, check_weights
from kvindex_adapters.hf.chat import BaseChat
from kvindex_adapters.hf.chat import Chat as ModelChat
from kvindex_adapters.hf.generate import ONE_ANSWER, Generation, generate
from kvindex_adapters.hf.generation.prefill import vocabulary_of
from kvindex_adapters.hf.model.info import reads_chunks
from kvindex_adapters.llama.heads import HeadRanks


class Engine(NamedTuple):
    """An engine that answers prompts with one loaded model.

    Args:
        name: "decoder" or "transformers".
        generate: Function that answers a prompt and takes the options of `kvhf.generate`.
        opened: Function that opens an empty `Document`. It takes `branch`, `index`, `k` and
            `attach_options`.
        chat: Function that opens a chat from the keyword arguments of `kvhf.Chat`.
        longest: Maximum length of the model's context in tokens, or None if the model's
            configuration does not state it.
        one_call: Whether the model must process a prompt in one call, so that no question can
            follow a document that was read.
    """

    name: str
    generate: Callable[..., Generation]
    opened: Callable[..., AbstractContextManager[Document]]
    chat: Callable[..., BaseChat]
    longest: int | None = None
    one_call: bool = False


def check_engine(
    engine: str | None, weights: str = PLAIN, *, keeps_cache: bool = False
) -> str | None:
    """Return the engine that the options require: "decoder", "transformers", or None for either.

    FP8 weights require the engine "decoder".

    Args:
        engine: Value of the option `--engine`, or None.
        weights: "plain" for unchanged weights, or "fp8".
        keeps_cache: Whether the command saves or loads a KV cache.

    Raises:
        ValueError: There is no such engine, or the engine does not support the other options.
    """
    if engine is not None:
        check.one_of("engine", engine, ENGINES)
    check_weights(weights)
    if weights != PLAIN and engine == "transformers":
        raise ValueError(
            f"weights: got {weights!r} with --engine transformers, which allows only {PLAIN!r}; "
            "pass --engine decoder"
        )
    if weights != PLAIN and keeps_cache:
        raise ValueError(
            f"weights: got {weights!r} with --save-cache or --load-cache, allowed is {PLAIN!r}: "
            "a saved cache has to be computed with the same weights as the tokens after it"
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
    *,
    draft: tuple[Any, Any] | None = None,
) -> Engine:
    """Make an engine that runs a loaded model.

    The default is kvindex's minimal decoder ("decoder") if the model is on a GPU and the decoder
    supports the model. Otherwise the default is transformers.

    Args:
        engine: "decoder" or "transformers", or None for the default.
        model: The transformers model.
        tokenizer: The model's tokenizer.
        options: Options of `model.generate`.
        seed: Random seed for sampling tokens.
        weights: "plain" for unchanged weights, or "fp8" (only with the decoder).
        ranks: The processes over which the decoder shards the model's heads, or None for one
            process.
        draft: A smaller model that writes drafts, and its tokenizer, or None.

    Raises:
        ValueError: `engine` is "decoder", and the decoder does not support a model or the options.
            Or the smaller model has another vocabulary.
    """
    drafts: dict[str, Any] = {}
    if draft is not None:
        sizes = vocabulary_of(model), vocabulary_of(draft[0])
        check_vocabularies(sizes, (tokenizer, draft[1]))
        drafts["draft_model"] = draft[0]
    opened = partial(CacheDocument.opened, model, tokenizer)
    config = model.config.get_text_config(decoder=True).to_dict()
    longest = config.get("max_position_embeddings")
    chat: Callable[..., BaseChat] = partial(ModelChat, model, tokenizer, **options, **drafts)
    answer = partial(generate, model, tokenizer, **options, **drafts)
    other = Engine("transformers", answer, opened, chat, longest, not reads_chunks(model))
    usual = "decoder" if model.device.type == "cuda" else "transformers"
    if (engine or usual) == "transformers":
        return other
    try:
        given = {**model.generation_config.to_dict(), **ONE_ANSWER, **options}
        sampling = sampling_like(given, seed)
        decoder = Decoder.of(model, tokenizer, weights=weights, ranks=ranks)
        if draft is not None:
            drafts["draft_model"] = Decoder.of(*draft)
    except ValueError as error:
        if engine is not None:
            raise ValueError(
                f"engine: got 'decoder', which does not support these options: {error}"
            ) from None
        console.print(f"using transformers instead of the decoder: {error}", markup=False)
        return other
    opened = partial(SessionDocument.opened, decoder)
    chat = partial(DecoderChat, decoder, sampling=sampling, **drafts)
    answered = partial(decoder.generate, sampling=sampling, **drafts)
    return Engine("decoder", answered, opened, chat, longest)
