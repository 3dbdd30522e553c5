"""Evaluation of indexes on real models: captured keys, recall, KL from full attention, tasks."""
