"""Evaluate indexes on real models: recall, divergence from full attention, and tasks."""
