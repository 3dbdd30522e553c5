"""The command-line program `kvindex`. It requires the package typer."""

try:
    from kvindex_adapters.cli.app import app, main
except ModuleNotFoundError as error:
    if error.name != "typer":
        raise
    raise ImportError(
        "the package typer is not installed, but the command line of kvindex needs it; "
        'run pip install -e ".[hf,cli]" in a checkout of kvindex'
    ) from None

__all__ = ["app", "main"]
