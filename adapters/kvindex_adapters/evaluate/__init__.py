"""Evaluate indexes on real models: recall, KL divergence from full attention, and task accuracy."""
