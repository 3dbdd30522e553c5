"""Continuous batching (`model.generate_batch`) with indexes for long requests."""
