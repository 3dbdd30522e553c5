"""Inspect, patch, identify and load models of transformers."""
