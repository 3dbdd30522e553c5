"""Parts that several adapters share: layer options, placement of memory, token timing, ranks."""
