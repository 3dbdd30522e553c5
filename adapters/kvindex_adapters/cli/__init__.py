"""The command line `kvindex`."""

try:
    from kvindex_adapters.cli.app import app, main
except ModuleNotFoundError as error:
    if error.name != "typer":
        raise
    raise ImportError(
        "typer: got no package of this name, which comes with the extra cli: "
        "pip install 'kvindex-torch[hf,cli]'"
    ) from None

__all__ = ["app", "main"]
