"""What `append.py` measures."""
