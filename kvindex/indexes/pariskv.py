"""ParisKV. This module only imports the class; its code is in the package `kvindex.pariskv`."""

from kvindex.pariskv.index import ParisKV

__all__ = ["ParisKV"]
