"""Code that several benchmarks use: synthetic layers, models, timing and checks of results."""
