"""Loading of indexes and layers that were saved to a folder."""
