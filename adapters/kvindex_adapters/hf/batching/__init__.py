"""Continuous batching (`model.generate_batch`) in which long requests attend through an index."""
