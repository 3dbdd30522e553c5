"""Inspect, patch, identify and load transformers models."""
