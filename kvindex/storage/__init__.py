"""Storage of keys, values and codes: row stores, row codecs, growing tensors, and saved folders."""
