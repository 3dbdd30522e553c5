"""Bases of indexes: what several of them share."""
