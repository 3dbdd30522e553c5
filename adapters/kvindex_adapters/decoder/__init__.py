"""A minimal decoder: the forward pass of a Llama-like model in plain torch, short enough to read.

```python
from kvindex_adapters.decoder import Decoder

decoder = Decoder.from_pretrained("folder", device="cuda")
print(decoder.generate("Once upon a time", index="pariskv").text)
```

Read `layers.py` first, then `session.py`, then `decoder.py`.
"""

from importlib.util import find_spec

if find_spec("transformers") is None:
    from kvindex.core.extras import how_to_install

    raise ImportError(
        "kvindex_adapters.decoder needs transformers, which is not installed; "
        f"install it with {how_to_install('hf')}"
    )

from kvindex_adapters.decoder.chat import Chat
from kvindex_adapters.decoder.config import supports
from kvindex_adapters.decoder.decoder import Decoder
from kvindex_adapters.decoder.open_session import OpenSession
from kvindex_adapters.decoder.sampling import Sampling, sampling_like

__all__ = ["Chat", "Decoder", "OpenSession", "Sampling", "sampling_like", "supports"]


def __dir__() -> list[str]:
    return __all__
