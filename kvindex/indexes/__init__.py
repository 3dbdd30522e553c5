"""The indexes, one per file. `kvindex.names()` lists their names."""
