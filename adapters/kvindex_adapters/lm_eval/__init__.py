"""The model type `kvindex` for lm-evaluation-harness: run the harness's tasks through an index.

python -m kvindex_adapters.lm_eval --model kvindex --model_args pretrained=smollm2,index=quest,k=512

The module `kvindex_adapters.lm_eval` is the harness's command `lm_eval` with one more model type.
docs/adapters/lm-eval.md says how answers are scored.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

from kvindex.core.extras import how_to_install


def register() -> Any:
    """Register the model type `kvindex` in the harness, and return its class.

    Raises:
        ImportError: The harness is not installed.
    """
    if find_spec("lm_eval") is None:
        raise ImportError(
            "kvindex_adapters.lm_eval needs lm-evaluation-harness, which is not installed; install "
            f"it with {how_to_install('hf,lm-eval')}"
        )
    from kvindex_adapters.lm_eval.model import KVIndexLM

    return KVIndexLM
