"""Compare indexes on one model.

A comparison measures the accuracy of answers to tasks, the KL divergence from full attention on a
text, the number of keys and values that attention reads, memory, and time.
"""
