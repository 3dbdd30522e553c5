"""Pools: many sequences, which a serving engine can open, fork, batch and close."""
