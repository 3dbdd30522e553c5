"""Benchmarks. Each script answers one question. It first checks that results are right, and then
measures.
"""
