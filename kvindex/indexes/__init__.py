"""One index per file; `kvindex.names()` lists the files."""
