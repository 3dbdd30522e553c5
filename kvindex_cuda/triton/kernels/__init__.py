"""Functions that Triton compiles. Their launchers, which check arguments, are one folder up."""
