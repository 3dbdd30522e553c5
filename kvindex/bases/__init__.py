"""Base classes of indexes.

`BaseIndex` is the base of all indexes. Its subclasses here are the bases of indexes that select
pages or clusters of tokens, evict tokens, or search with the FAISS library.
"""
