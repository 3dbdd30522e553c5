"""The error for models and calls that an adapter does not support."""


class UnsupportedError(ValueError):
    """Raised when an adapter does not support a model, an option or a call. The message states
    why."""
