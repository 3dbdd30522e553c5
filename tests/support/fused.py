"""The decoder's Triton kernels on a CPU, as reference implementations in torch."""

from functools import wraps
from types import SimpleNamespace

from kvindex_adapters.hf.graph import fused_token


def on_a_cpu(monkeypatch):
    """Let `attach(fused=True)` accept a CPU, with reference kernels."""
    import kvindex_cuda.triton as kernels

    for name in ("norm_linear", "norm_swiglu", "linear_residual", "swiglu_linear"):
        monkeypatch.setattr(kernels, name, _without_tiles(getattr(kernels.reference, name)))
    monkeypatch.setattr(kernels, "project_heads", _project_heads)
    for name in ("begin_token", "most_likely"):
        monkeypatch.setattr(kernels, name, _alone(getattr(kernels.reference, name)))
    monkeypatch.setattr(fused_token, "device_refusal", lambda device: None)


def _without_tiles(kernel):
    @wraps(kernel)
    def call(*given, tile, early=False):
        return kernel(*given)

    return call


def _alone(kernel):
    @wraps(kernel)
    def call(*given, overlap, scratch=None):
        return kernel(*given)

    return call


def _project_heads(x, norm, matrix, cos, sin, slots, *given, tile, **norms):
    """Write to the first slot of each sequence, which a graph cannot read on the host."""
    import kvindex_cuda.triton as kernels

    first = SimpleNamespace(tolist=lambda: [0] * len(slots))
    kernels.reference.project_heads(x, norm, matrix, cos, sin, first, *given[:3], **norms)
