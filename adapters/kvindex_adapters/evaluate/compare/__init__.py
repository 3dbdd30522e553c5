"""Compare indexes on one model: answers to tasks, divergence on a text, rows, bytes and time."""
