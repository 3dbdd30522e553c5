"""What benchmarks/field.py is made of: layers of a real model, and what an index does on one."""
