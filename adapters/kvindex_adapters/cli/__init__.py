"""The command-line program `kvindex`. It requires the package typer."""

try:
    from kvindex_adapters.cli.app import app, main
except ModuleNotFoundError as error:
    if error.name != "typer":
        raise

    def main() -> None:
        """Print how to install the command line, and exit with status 2."""
        import sys

        from kvindex.core.extras import how_to_install

        print(
            "error: the command line needs typer, which is not installed; install it with "
            f"{how_to_install('hf,cli')}",
            file=sys.stderr,
        )
        sys.exit(2)


__all__ = ["app", "main"]
