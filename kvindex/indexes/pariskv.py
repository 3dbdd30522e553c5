"""ParisKV, whose class, configuration and reference stages are in `kvindex.pariskv`."""

from kvindex.pariskv.index import ParisKV

__all__ = ["ParisKV"]
