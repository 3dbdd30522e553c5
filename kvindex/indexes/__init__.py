"""Indexes, one per file; `kvindex.names()` lists the files."""
