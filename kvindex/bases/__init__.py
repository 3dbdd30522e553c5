"""Base classes of indexes: for all indexes, and for those that select pages, clusters or sentences,
evict rows, or use FAISS.
"""
