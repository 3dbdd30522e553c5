"""Version of kvindex: ranks of one run have the same."""

__version__ = "0.1.0"
