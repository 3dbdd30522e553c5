"""The command line `kvindex`."""

try:
    from kvindex_adapters.cli.app import app, main
except ModuleNotFoundError as error:
    if error.name != "typer":
        raise
    raise ImportError(
        "typer: got no package of this name. The command line needs it: "
        'run pip install -e ".[hf,cli]" in a checkout of kvindex'
    ) from None

__all__ = ["app", "main"]
