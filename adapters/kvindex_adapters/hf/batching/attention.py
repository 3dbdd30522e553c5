"""The attention function for continuous batching: with an index or the model's own attention."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from kvindex.core.protocol import Rows
from kvindex_adapters.common.unsupported import UnsupportedError
from kvindex_adapters.hf.batching.cache import PagedRows
from kvindex_adapters.hf.batching.step import places
from kvindex_adapters.hf.model.attachment import attached
from kvindex_adapters.hf.unsupported import check_attention, layer_number, sink_logits_of

NAME = "kvindex_paged"
"""Value of `_attn_implementation` in the configurations of layers with an index."""

PACKED = ("cache", "cu_seq_lens_q", "cu_seq_lens_k", "is_causal")
"""Arguments of the attention call that say where each sequence is in the concatenated tokens.

They are not checked, because `Step` has the same information.
"""


@torch.no_grad()
def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **call: Any,
) -> tuple[Tensor, None]:
    """Compute the attention of all new tokens of a batch. transformers calls this function.

    For a long request with one new token, this function searches the index of the request. For all
    other requests, it calls transformers' own attention function.

    Args:
        module: The attention module.
        query: `[1, H, T, D]`, the new tokens of all requests, concatenated.
        key: `[1, G, T, D]`.
        value: `[1, G, T, Dv]`.
        attention_mask: The mask of transformers, or None.
        **call: Further arguments of transformers.

    Returns:
        The output `[1, T, H, Dv]`, and None instead of attention weights.

    Raises:
        UnsupportedError: The attention has terms that an index cannot compute, or the call does not
            come from continuous batching.
    """
    attachment = attached.get(module)
    batching = None if attachment is None else attachment.batching
    if batching is None or batching.step is None or call.get("block_table") is not None:
        raise UnsupportedError(
            f"{type(module).__name__}: got a call outside of continuous batching; inside "
            "attach_batch() call only model.generate_batch"
        )
    _check_call(module, call)
    number, step = layer_number(module), batching.step
    layer, plain = batching.layers[number], batching.plain_attention()
    batching.attended.add(number)
    layer.keep(step.active)
    searching = [part for part in step.parts if layer.searches(part)]
    rows = PagedRows(batching.cache, number, call, Rows(key, value))
    if not searching:
        return rows.attend(plain, module, query, rows.like, attention_mask, call), None
    rows.write(rows.like)
    output = query.new_empty((1, query.shape[2], query.shape[1], value.shape[3]))
    dense = [part for part in step.parts if not layer.searches(part)]
    if dense:
        tokens = places((part.tokens for part in dense), query.device)
        seen = places((part.slots for part in dense), query.device)
        new = Rows(key[:, :, tokens], value[:, :, tokens])
        mask = None if attention_mask is None else attention_mask[:, :, tokens][..., seen]
        own = rows.call_with(rows.slots[seen], rows.written[tokens])
        output[:, tokens] = rows.attend(plain, module, query[:, :, tokens], new, mask, own)
    tokens = places((part.tokens for part in searching), query.device)
    queries = query[0, :, tokens].transpose(0, 1)
    output[0, tokens] = layer.attend(queries, searching, rows, call.get("scaling"))
    return output, None


def _check_call(module: nn.Module, call: dict[str, Any]) -> None:
    """Raise UnsupportedError for dropout, soft caps, position biases or learned sinks in the
    attention."""
    name, other = type(module).__name__, {k: v for k, v in call.items() if k not in PACKED}
    check_attention(name, module, 1, other.pop("dropout", 0.0), other)
    terms = {"softcap": other.get("softcap"), "position_bias": other.get("position_bias")}
    terms["learned sinks"] = sink_logits_of(name, module, other)
    for term, given in terms.items():
        if given is not None:
            raise UnsupportedError(
                f"{name}: got attention with {term}, which attach_batch() does not support"
            )


AttentionInterface.register(NAME, attention)
