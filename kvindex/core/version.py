"""Version: all ranks of a run have the same; `kvindex.__version__`."""

__version__ = "0.1.0"
