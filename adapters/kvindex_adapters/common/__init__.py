"""Helpers that several adapters use: options of layers, prompts, memory placement, timing, and
processes of torchrun."""
