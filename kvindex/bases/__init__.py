"""Base classes of indexes, one for each kind of unit: pages, clusters, sentences and others."""
