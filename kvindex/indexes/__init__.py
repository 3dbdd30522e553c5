"""The index classes, one per file. `kvindex.names()` returns the names of all indexes."""
