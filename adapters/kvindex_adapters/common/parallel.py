"""Helpers for runs with torchrun: join the process group, and check how heads or tokens are
sharded."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from kvindex.core.protocol import KVIndex
from kvindex.core.ranks import TIMEOUT_S, Ranks
from kvindex.wrappers import Sharded, Wrapper
from kvindex_adapters.common.unsupported import UnsupportedError

BOTH_SHARDED = (
    "index: got an index that shards tokens, with a model whose heads are sharded; "
    "shard either tokens or heads: ranks that shard tokens must all have the same heads"
)


def launched() -> bool:
    """Return True if torchrun has started this process."""
    return dist.is_available() and dist.is_torchelastic_launched()


def rank() -> tuple[int, int]:
    """Return this process's rank and the number of ranks, or (0, 1) without a process group."""
    if not (dist.is_available() and dist.is_initialized()):
        return 0, 1
    return dist.get_rank(), dist.get_world_size()


def join(device: str, timeout_s: float = TIMEOUT_S) -> str:
    """Join the process group of the processes that torchrun has started.

    On GPUs, each process uses the GPU of its local rank, and the processes communicate with NCCL.
    On CPUs, they communicate with gloo. Afterwards only rank 0 prints to standard output.

    Args:
        device: "cpu" or "cuda".
        timeout_s: Seconds after which a collective operation fails.

    Returns:
        The device of this process.
    """
    place = torch.device(device)
    if place.type == "cuda":
        place = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(place)
    backend = "nccl" if place.type == "cuda" else "gloo"
    dist.init_process_group(backend, timeout=timedelta(seconds=timeout_s))
    if dist.get_rank():
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115  # open until the process ends
    return str(place)


def leave() -> None:
    """Leave the process group. All ranks must call this before they exit.

    It first frees unreferenced CUDA graphs: NCCL cannot shut down while graphs with collective
    operations exist.
    """
    gc.collect()
    if rank()[1] > 1:
        dist.barrier()
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()


def heads_over_ranks() -> dict[str, Any]:
    """Return the keyword arguments of `from_pretrained` that shard the heads over the ranks."""
    from transformers.distributed import DistributedConfig

    return {"distributed_config": DistributedConfig(tp_plan="auto")}


def check_heads(config: Any) -> None:
    """Raise ValueError if the number of ranks does not divide the model's KV heads.

    Args:
        config: The model's configuration.
    """
    text, ranks = config.get_text_config(), rank()[1]
    heads = vars(text).get("num_key_value_heads") or text.num_attention_heads
    if heads % ranks:
        raise ValueError(
            f"--nproc-per-node: got {ranks}, but the model has {heads} KV heads; pass a number "
            "that divides the KV heads, or an index that shards tokens, such as pariskv+sharded"
        )


def has_head_shards(model: nn.Module) -> bool:
    """Return True if the weights of a model are sharded over several ranks."""
    return any(isinstance(weight, DTensor) for weight in model.parameters())


def check_whole(decoder: nn.Module) -> None:
    """Check that a decoder has all of its weights in this process.

    Raise UnsupportedError if they are sharded over several ranks.
    """
    if has_head_shards(decoder):
        raise UnsupportedError(
            "cache: got the cache of a model whose heads are sharded over ranks; save and load "
            "need a model that is in one process, because each rank has only the keys and values "
            "of its own heads"
        )


def check_shards(model: nn.Module, index: KVIndex) -> None:
    """Raise UnsupportedError if the index shards tokens and the model shards heads."""
    if is_sharded(index) and has_head_shards(model):
        raise UnsupportedError(BOTH_SHARDED)


def is_sharded(index: KVIndex) -> bool:
    """Return True if the tokens of an index are sharded over several processes."""
    return sharded(index) is not None


def sharded(index: KVIndex) -> Sharded | None:
    """Return the `Sharded` wrapper around an index, or None if its tokens are in one process."""
    while isinstance(index, Wrapper):
        if isinstance(index, Sharded) and index.ranks > 1:
            return index
        index = index.inner
    return None


def waiting(indexes: Iterable[KVIndex]) -> dict[str, Callable[[Any], None]]:
    """Return keyword arguments for `TokenRing`, so that it raises an error if another rank is lost.

    `TokenRing` then waits for a CUDA graph with collective operations only until a timeout. All
    ranks must call this function. If there is only one rank, the returned dict is empty.

    Args:
        indexes: The indexes of the cache.
    """
    if rank()[1] < 2:
        return {}
    shared = next((one for one in map(sharded, indexes) if one is not None), None)
    return {"wait": (Ranks.of() if shared is None else shared).wait_for}
