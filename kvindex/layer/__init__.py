"""An attention layer over an index: sink, retrieval, local window and update buffer."""

from kvindex.layer.attention_layer import AttentionLayer

__all__ = ["AttentionLayer"]
