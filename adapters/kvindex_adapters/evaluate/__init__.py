"""Judge an index by a model's answers and by its distance from full attention."""
