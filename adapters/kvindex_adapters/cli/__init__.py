"""The command line `kvindex`."""

from kvindex_adapters.cli.app import app, main

__all__ = ["app", "main"]
