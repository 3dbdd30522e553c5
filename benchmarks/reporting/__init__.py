"""Functions that turn results of benchmarks into the tables and pictures of the docs."""
