"""`SearchingAMXLatentBackend`: vLLM's backend for multi-head latent attention on CPUs with AMX."""

from __future__ import annotations

from vllm.v1.attention.backends.mla.amx_mla import AMXMLABackend

from kvindex_adapters.vllm.latents import LatentBackend


class SearchingAMXLatentBackend(LatentBackend, AMXMLABackend):
    """vLLM's MLA backend for CPUs with AMX, with an index if the engine's backend is "KVINDEX"."""
