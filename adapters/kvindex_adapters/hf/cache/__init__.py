"""The cache of an attached model, with its layers, padding, sliding windows, saving and report."""
