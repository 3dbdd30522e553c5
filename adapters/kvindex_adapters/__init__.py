"""Adapters that put any index into a language model; `kvindex_adapters.hf` is for transformers."""
