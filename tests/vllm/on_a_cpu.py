"""The plug-in's GPU backend in vLLM's engine on a CPU: emulated kernels, prompts in torch."""

import os
from pathlib import Path

from kvindex.core.geometry import Geometry
from kvindex_adapters.vllm import pages, register
from kvindex_adapters.vllm.attention import PagedAttention, Sequence
from kvindex_adapters.vllm.engine import options_of
from kvindex_adapters.vllm.gpu import SearchingFlashAttention, SearchingFlashBackend
from kvindex_adapters.vllm.options import Options
from kvindex_cuda.runtime import launch
from tests.cuda import emulator

PLUGIN = "on_a_cpu"
"""Name of the entry point `emulate`."""

_emulated = emulator.emulated()


def emulate():
    """Register the plug-in and the emulated backends, in each process of vLLM."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    register()
    members = AttentionBackendEnum.__members__
    latents = "tests.vllm.latents_on_a_cpu.Backend"
    paths = dict(CPU_ATTN=f"{__name__}.Backend", CPU_MLA=latents, AMX_MLA=latents)
    for name in paths.keys() & members.keys():
        register_backend(members[name], paths[name])
    if "cpu" not in launch.LOADERS:
        _emulated.__enter__()


def environment(folder):
    """Return variables with which the processes of vLLM call `emulate`.

    A package in `folder` has the entry point.
    """
    package = folder / "on_a_cpu-1.0.dist-info"
    package.mkdir()
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: on_a_cpu\nVersion: 1.0\n")
    entry = f"[vllm.general_plugins]\n{PLUGIN} = {__name__}:emulate\n"
    (package / "entry_points.txt").write_text(entry)
    root = str(Path(__file__).parents[2])
    path = [root, *filter(None, [os.environ.get("PYTHONPATH")]), str(folder)]
    return {"VLLM_PLUGINS": PLUGIN, "PYTHONPATH": os.pathsep.join(path)}


class Backend(SearchingFlashBackend):
    """A backend in place of CPU_ATTN."""

    @staticmethod
    def get_name():
        return "CPU_ATTN"

    @staticmethod
    def get_impl_cls():
        return Attention

    @classmethod
    def get_required_kv_cache_layout(cls):
        return "HND"


class Attention(SearchingFlashAttention):
    """FlashAttention's results, in plain torch."""

    searched = 0
    """Number of calls that searched, in all layers."""

    copied = 0
    """Number of sequences whose rows were copied from the host for full attention, in all
    layers."""

    def __init__(self, *given, **named):
        from vllm.config import get_current_vllm_config

        super().__init__(*given, **named)
        config = get_current_vllm_config()
        # layers of a draft model have no index
        heads = dict(q_heads=self.num_heads, kv_heads=self.num_kv_heads, head_dim=self.head_size)
        geometry = self.geometry or Geometry.of(**heads, dtype=config.model_config.dtype)
        self.plain = PagedAttention.of(options_of(config) or Options(), geometry)

    def scales(self, layer):
        return None if self.geometry is None else super().scales(layer)

    def do_kv_cache_update(self, layer, key, value, kv_cache, slot_mapping):
        if self.host is not None:
            super().do_kv_cache_update(layer, key, value, kv_cache, slot_mapping)
            return
        slots = slot_mapping.long()
        given = slots, key[: len(slots)], value[: len(slots)], self.scales(layer)
        pages.write_rows(self._rows(kv_cache), *given)

    def forward(self, layer, query, key, value, kv_cache, metadata, output, **more):
        Attention.searched += metadata is not None and metadata.searching is not None
        return super().forward(layer, query, key, value, kv_cache, metadata, output, **more)

    def attend_whole(self, layer, query, key, value, kv_cache, metadata, output, *scales):
        if metadata is None:
            return output
        starts, lengths = metadata.query_start_loc.tolist(), metadata.seq_lens.tolist()
        for number, length in enumerate(lengths):
            own = slice(starts[number], starts[number + 1])
            if own.start == own.stop:
                continue
            Attention.copied += self.host is not None
            table, scales = metadata.block_table[number], self.scales(layer)
            sequence = Sequence(kv_cache, None, table, length, scales)
            output[own] = self.plain.attend_dense(query[own], sequence, self.sinks)
        return output
