"""Engines with KV connectors, of which vLLM allows one at a time in a process."""

from contextlib import contextmanager

from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer import kv_transfer_state


def transfer(connector, **extra):
    """Return the configuration of a connector with its own settings."""
    return KVTransferConfig(
        kv_connector=connector, kv_role="kv_both", kv_connector_extra_config=extra
    )


class Connected:
    """An engine whose connector is that of the process inside `with`.

    Args:
        make: Makes the engine.
    """

    def __init__(self, make):
        self.connector = None
        with self.entered():
            self.llm = make()

    @contextmanager
    def entered(self):
        """Use the connector of this engine."""
        before = kv_transfer_state._KV_CONNECTOR_AGENT
        kv_transfer_state._KV_CONNECTOR_AGENT = self.connector
        try:
            yield
        finally:
            self.connector = kv_transfer_state._KV_CONNECTOR_AGENT
            kv_transfer_state._KV_CONNECTOR_AGENT = before
