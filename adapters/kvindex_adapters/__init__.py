"""Adapters that use any index as the KV cache of a language model.

The package `hf` is for transformers models, and `vllm` for a vLLM engine. The package `decoder`
contains a small decoder that runs models of the Llama family without transformers' forward pass.
The package `cli` contains the command line.
"""
