"""Tensor parallelism and torchrun: joining the other processes, and what must not be mixed."""

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
    "index: got one whose tokens are sharded, of a model whose heads several ranks share, "
    "allowed is one or the other: ranks that share tokens have the same heads"
)


def launched() -> bool:
    """Whether torchrun has started this process."""
    return dist.is_available() and dist.is_torchelastic_launched()


def rank() -> tuple[int, int]:
    """This process's rank, and how many there are; 0 of 1 without a process group."""
    if not (dist.is_available() and dist.is_initialized()):
        return 0, 1
    return dist.get_rank(), dist.get_world_size()


def join(device: str, timeout_s: float = TIMEOUT_S) -> str:
    """Join the processes that torchrun has started: gives this one's device.

    A GPU for each process of a host, by its local rank; on CPUs gloo carries the messages. From
    here on only the first prints on standard output. timeout_s: of collectives.
    """
    place = torch.device(device)
    if place.type == "cuda":
        place = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(place)
    backend = "nccl" if place.type == "cuda" else "gloo"
    dist.init_process_group(backend, timeout=timedelta(seconds=timeout_s))
    if dist.get_rank():
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115  # as long as it lives
    return str(place)


def leave() -> None:
    """Leave the group, at the end of a process that all ranks have reached.

    Graphs that hold collectives, and that nothing refers to any more, go before: NCCL waits for
    them.
    """
    gc.collect()
    if rank()[1] > 1:
        dist.barrier()
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()


def heads_over_ranks() -> dict[str, Any]:
    """Keywords of `from_pretrained` by which each rank gets its share of the heads."""
    from transformers.distributed import DistributedConfig

    return {"distributed_config": DistributedConfig(tp_plan="auto")}


def check_heads(config: Any) -> None:
    """Raises ValueError for a model whose KV heads no ranks can share evenly.

    config: of transformers.
    """
    text, ranks = config.get_text_config(), rank()[1]
    heads = vars(text).get("num_key_value_heads") or text.num_attention_heads
    if heads % ranks:
        raise ValueError(
            f"--nproc-per-node: got {ranks} processes for {heads} KV heads, allowed are numbers "
            "that divide them, or an index that shares tokens, as pariskv+sharded does"
        )


def has_head_shards(model: nn.Module) -> bool:
    """Whether several ranks have the weights of a model together."""
    return any(isinstance(weight, DTensor) for weight in model.parameters())


def check_whole(decoder: nn.Module) -> None:
    """Raises UnsupportedError for a decoder whose weights are those of one rank of several."""
    if has_head_shards(decoder):
        raise UnsupportedError(
            "cache: got one of a model whose heads several ranks share, allowed for save and load "
            "is a model that one process has whole: a rank has only the keys and values of its own "
            "heads"
        )


def check_shards(model: nn.Module, index: KVIndex) -> None:
    """Raises UnsupportedError for shards of tokens whose ranks have other heads each."""
    if is_sharded(index) and has_head_shards(model):
        raise UnsupportedError(BOTH_SHARDED)


def is_sharded(index: KVIndex) -> bool:
    """Whether an index shares its tokens with other processes."""
    return sharded(index) is not None


def sharded(index: KVIndex) -> Sharded | None:
    """The wrapper of an index that shares its tokens with other processes, or None."""
    while isinstance(index, Wrapper):
        if isinstance(index, Sharded) and index.ranks > 1:
            return index
        index = index.inner
    return None


def waiting(indexes: Iterable[KVIndex]) -> dict[str, Callable[[Any], None]]:
    """Keywords of `TokenRing`: among several processes it waits no longer than for a rank.

    All of them call it. indexes: of the cache.
    """
    if rank()[1] < 2:
        return {}
    shared = next((one for one in map(sharded, indexes) if one is not None), None)
    return {"wait": (Ranks.of() if shared is None else shared).wait_for}
