"""The protocol of an index, and helpers that all other packages of kvindex use."""
