"""The command `kvindex`."""

from kvindex_adapters.cli.app import app, main

__all__ = ["app", "main"]
