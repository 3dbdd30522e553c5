"""Continuous batching (`model.generate_batch`) whose requests search their rows."""
