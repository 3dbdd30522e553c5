"""The version, `kvindex.__version__`. All ranks of a run must have the same version."""

__version__ = "0.1.0rc1"
