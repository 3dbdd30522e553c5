"""Run the command line with `python -m kvindex_adapters`, for example under torchrun."""

from kvindex_adapters.cli import main

main()
