"""Test a model family with prompts in chunks, at lengths where its rotary frequencies change.

With the index `exact`, which retrieves all tokens, `kvhf.generate` reads a prompt in chunks and
generates an answer. Its logits are compared with those of the same model without an index, which
reads the prompt in one call.

Without an index, the model usually uses transformers' cache. It uses no cache if the family must
read all tokens again when the frequencies change.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from family_sizes import build
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessor, PreTrainedModel

import kvindex_adapters.hf as kvhf
from kvindex_adapters.hf.model.cache_argument import CACHE
from kvindex_adapters.hf.model.info import text_positions
from kvindex_adapters.hf.model.reread import FAMILIES as REREADING
from kvindex_adapters.hf.model.rotary import length_dependent

CHUNK, STEPS = 16, 4
"""Number of tokens in a chunk of the prompt, and number of tokens in the answer."""

LONG = 40
"""Number of tokens in the prompt: three chunks, and more than any sliding window in
`family_sizes.toml`."""

SWITCHES = (LONG - 8, LONG + STEPS // 2)
"""Sequence lengths at which rotary frequencies change: one in the prompt, one in the answer."""

REGIONS = dict(index="exact", k=500, sink=2, local_window=4, update_every=4, dense_below=0)


TIED = ("dots3_note", "dots3_note_text")
"""Families that are not tested. Their models select the tokens to attend to with a trained indexer.

In a short text, the indexer gives equal scores to several tokens. Which of these tokens it selects
depends on the number of tokens per call, even with transformers' own cache.
"""

Change = Callable[[Any], None] | None
"""A function that changes a decoder's configuration before the model is made."""


class Words:
    """A minimal tokenizer for the tests. `kvhf.generate` requires a tokenizer."""

    def decode(self, ids: Tensor, **options: Any) -> str:
        """Return token ids as a string of numbers."""
        return " ".join(map(str, ids.tolist()))


class Record(LogitsProcessor):
    """A logits processor that records the logits `[1, V]` of each generated token."""

    def __init__(self) -> None:
        self.logits: list[Tensor] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Record the logits, and return them unchanged."""
        self.logits.append(scores.float())
        return scores


def variants(model: PreTrainedModel) -> Iterator[tuple[str, list[Change]]]:
    """Yield configurations with which a model's rotary frequencies depend on the sequence length.

    Each item has a name and a list of functions. A function changes the configuration of a model
    before the model is made, so each function needs a model of its own. The last item, `chunks`,
    has None in place of a function: the configuration is not changed.
    """
    parameters = vars(model.config.get_text_config(decoder=True)).get("rope_parameters")
    sizes = {
        name.rpartition(".")[2]: buffer.shape[-1]
        for name, buffer in model.named_buffers()
        if name.endswith("inv_freq")
    }
    if parameters and sizes:
        switches = SWITCHES if model.config.model_type in REREADING else SWITCHES[:1]
        yield "longrope", [partial(_longrope, sizes, switch) for switch in switches]
        yield "dynamic", [_dynamic]
    yield "chunks", [None]


def _all_parameters(config: Any) -> dict[str, dict[str, Any]]:
    """Return the rotary parameters of a configuration, separately for each type of layer.

    The result maps the name of a buffer of the model to rotary parameters. The model stores the
    frequencies that follow from the parameters in this buffer. If all layers have the same
    parameters, there is only one buffer.
    """
    parameters = config.rope_parameters
    by_type = {
        f"{kind}_inv_freq": part for kind, part in parameters.items() if isinstance(part, dict)
    }
    return by_type or {"inv_freq": parameters}


def _longrope(sizes: dict[str, int], switch: int, config: Any) -> None:
    """Configure rotary frequencies that change when the sequence has more than `switch` tokens.

    `sizes` maps the name of a buffer of frequencies to the number of frequencies.
    """
    for name, parameters in _all_parameters(config).items():
        size = sizes.get(name, min(sizes.values()))
        parameters.update(
            rope_type="longrope",
            factor=4.0,
            short_factor=[1.0] * size,
            long_factor=[1.0 + 7.0 * i / size for i in range(size)],
            **dict(original_max_position_embeddings=switch, short_mscale=1.0, long_mscale=1.2),
        )
    if "original_max_position_embeddings" in vars(config) or config.model_type in REREADING:
        config.original_max_position_embeddings = switch


def _dynamic(config: Any) -> None:
    """Configure rotary frequencies that depend on the sequence length.

    If a sequence has at most `SWITCHES[0]` tokens, its frequencies do not depend on its length.
    """
    for parameters in _all_parameters(config).values():
        parameters.update(rope_type="dynamic", factor=4.0)
    config.max_position_embeddings = SWITCHES[0]


def own_logits(model: PreTrainedModel, ids: Tensor) -> list[Tensor]:
    """Return the logits `[1, V]` of the model without an index, for each token after the prompt.

    `ids` are the prompt and these tokens, int64 `[1, N]`.
    """
    logits, start, cache = [], 0, None
    again = model.config.model_type in REREADING
    with torch.no_grad():
        for stop in range(LONG, ids.shape[1]):
            mask = torch.ones_like(ids[:, :stop])
            given: dict[str, Any] = {"attention_mask": mask, CACHE: cache}
            given["use_cache"] = not again
            positions = text_positions(model, start, stop)
            if positions is not None:
                given["position_ids"] = positions
            output = model(input_ids=ids[:, start:stop], **given)
            cache, start = (None, 0) if again else (output[CACHE], stop)
            logits.append(output.logits[:, -1].float())
    return logits


def difference(model: PreTrainedModel, plain: PreTrainedModel, ids: Tensor) -> float:
    """Return the largest difference between logits with and without an index.

    The difference is relative to the largest logit, and infinite if a logit is NaN.

    Args:
        model: The model to run with an index.
        plain: An equal model to run without an index. It is a separate object if rotary embeddings
            change their state with the length.
        ids: The prompt, int64 `[N]`.
    """
    record, model.generation_config = Record(), GenerationConfig(pad_token_id=0)
    with kvhf.attach(model, **REGIONS) as cache:
        answer = kvhf.generate(
            model,
            Words(),
            ids,
            **dict(cache=cache, chunk=CHUNK, max_new_tokens=STEPS),
            logits_processor=[record],
        ).answer_ids
    expected = own_logits(plain, torch.cat([ids, answer])[None])
    worst = max(
        float((mine - own).abs().nan_to_num(math.inf).max())
        for mine, own in zip(record.logits, expected, strict=True)
    )
    return worst / max(float(own.abs().max()) for own in expected)


def crossed(family: str, model: PreTrainedModel, ids: Tensor) -> tuple[str, float]:
    """Compare the logits of a model with an index and without one.

    The function `variants` yields several configurations of the attention. This function tests only
    the first configuration with which the model runs.

    Args:
        family: Name of the model family.
        model: A model of the family with its usual rotary frequencies.
        ids: Token ids, int64 `[N]`. The first `LONG` of them are the prompt.

    Returns:
        The name of the tested configuration, or the reason why none is tested; and the largest
        difference of the logits.
    """
    if family in TIED:
        return "no: equal scores of its indexer", 0.0
    if why := _own_failure(model, ids[None, :LONG]):
        return f"no: its own `generate` raises {why}", 0.0
    for name, changes in variants(model):
        try:
            pairs = [_pair(family, model, change, ids) for change in changes]
        except Exception:
            continue
        return name, max(difference(*pair, ids[:LONG]) for pair in pairs)
    raise AssertionError(family)


def _own_failure(model: PreTrainedModel, ids: Tensor) -> str:
    """Return the class name of the error that `generate` raises without an index, or ""."""
    try:
        model.generate(ids, max_new_tokens=1)
    except Exception as error:
        return type(error).__name__
    return ""


def _pair(
    family: str, model: PreTrainedModel, change: Change, ids: Tensor
) -> tuple[PreTrainedModel, PreTrainedModel]:
    """Make two equal models of a family, after `change` was applied to the configuration.

    Raises an error if the family does not support the change, or if the change has no effect.
    """
    if change is None:
        return model, model
    pair = build(family, change), build(family, change)
    if not length_dependent(pair[0]):
        raise LookupError(
            f"{family}: got a model whose rotary embedding does not depend on the sequence length"
        )
    own_logits(pair[0], ids[None, : LONG + 1])
    return pair
