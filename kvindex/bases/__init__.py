"""Base classes of indexes: pages, clusters, sentences, eviction, query lists, FAISS."""
