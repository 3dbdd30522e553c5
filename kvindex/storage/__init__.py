"""Where rows and codes live: growable columns, row codecs, stores."""
