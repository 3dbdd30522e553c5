"""`python -m kvindex_adapters`: the command line, for torchrun."""

from kvindex_adapters.cli import main

main()
