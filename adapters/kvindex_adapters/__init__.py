"""Adapters that use any index as the KV cache of a language model.

The packages are `hf` for transformers models, `decoder` for a small decoder of its own, `vllm` for
a vLLM engine, and `cli` for the command line.
"""
