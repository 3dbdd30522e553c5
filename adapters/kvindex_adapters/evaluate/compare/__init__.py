"""Compare indexes on one model: measure answers to tasks, divergence on a text, rows, bytes and
time."""
