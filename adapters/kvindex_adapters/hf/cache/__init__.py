"""The cache of an attached model: its layers, padding, sliding windows, saving and report."""
