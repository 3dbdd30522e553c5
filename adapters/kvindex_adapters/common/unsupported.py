"""The error for models and calls that an adapter does not support."""


class UnsupportedError(ValueError):
    """A model or a call that the adapter does not support."""
