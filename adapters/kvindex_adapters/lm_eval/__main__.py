"""`python -m kvindex_adapters.lm_eval`: the command `lm_eval` with the model type `kvindex`."""

from __future__ import annotations

from kvindex_adapters.lm_eval import register


def main() -> None:
    """Register the model type, and run the command line of the harness."""
    register()
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()


if __name__ == "__main__":
    main()
