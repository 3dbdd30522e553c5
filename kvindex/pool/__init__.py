"""Pools: many sequences that a serving engine opens, forks, batches and closes."""
