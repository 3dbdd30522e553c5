"""Indexes compared on one model: answers to tasks, divergence on a text, rows, bytes, time."""
