"""Prompts and chats: encode prompts, prefill a cache with them, and continue a chat in a cache."""
