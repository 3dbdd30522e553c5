"""Prompts and conversations: encode, read into a cache, continue."""
