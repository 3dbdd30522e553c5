"""Test the vLLM plug-in on a CPU, with a tiny random model of every family that vLLM supports.

```
make .venv-vllm/.installed
PYTHONPATH=.:adapters .venv-vllm/bin/python tools/vllm_families.py [--only NAME ...] [--check]
```

The tool tests the families that transformers maps to causal language models, if vLLM has a class
for them. Three engines read the same prompts and generate the same number of tokens: vLLM without
the plug-in, and two engines with `attention_backend="KVINDEX"`. The first of these retrieves every
row (the key and the value of a token), so its tokens and log probabilities must agree with those of
vLLM. The second one retrieves one row, so its log probabilities must differ.

The command writes `docs/adapters/vllm-families.md` and `benchmarks/results/vllm-families.json`,
unless `--check` is given. The exit status is 1 if the results of any family differ, or if a family
that was equal in the stored results no longer is.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs/adapters/vllm-families.md"
RESULTS = ROOT / "benchmarks/results/vllm-families.json"

PYTHONPATH = os.environ.get("PYTHONPATH")

PROMPTS, STEPS, LENGTH = (300, 20, 420), 8, 512
EVERY_ROW = {"k": 2048, "dense_below": 0, "sink": 4, "local_window": 16}
ONE_ROW = EVERY_ROW | {"k": 1, "sink": 0, "local_window": 1}
TOLERANCE = {"float32": 2e-3, "bfloat16": 5e-2}
"""Dtype -> tolerance of log probabilities. Sums in another order give small differences."""

GATED = {"linear_key_head_dim": 128, "linear_value_head_dim": 128}
"""Sizes of gated linear attention that vLLM supports on a CPU."""

DTYPES = dict.fromkeys(("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"), "bfloat16")
"""Family -> dtype of its tiny model, if it is not float32. vLLM computes the linear attention of
some models on a CPU in bfloat16 only."""

LIMIT_S = 300

EQUAL, DIFFERENT, REFUSED, ERROR, NONE = "equal", "different", "refused", "error", "not run"
MEANING = {
    EQUAL: "tokens and log probabilities equal those of vLLM without the plug-in",
    DIFFERENT: "they differ, which is a defect",
    REFUSED: "not supported: the engine raises an error that says why",
    ERROR: "another error, which is a defect",
    NONE: ("not tested, because vLLM itself did not run the tiny model on a CPU"),
}

WIDE = {"hidden_size": 128, "n_embd": 128, "d_model": 128, "word_embed_proj_dim": 128}
WIDE |= {"head_dim": 32, "swa_head_dim": 32, "global_head_dim": 32}
"""Option of a model's configuration -> its value here, because vLLM's attention on a CPU needs
heads of at least 32 coordinates."""

YARN = {"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 2.0, "mscale": 1.0}
YARN |= {"mscale_all_dim": 1.0, "original_max_position_embeddings": 256}
"""A rotary embedding as in DeepSeek's models. On a CPU, vLLM's kernel for others ignores that the
rotated coordinates are a part of each query, and gives other results in other batches."""

LATENTS = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "head_dim": 64, "qk_head_dim": 80}
LATENTS |= {"rope_parameters": YARN}
"""Sizes of latents. On a CPU, vLLM's multi-head latent attention supports no others."""

CHUNKS = {"attention_chunk_size": 256, "num_experts_per_tok": 1}
"""Options of models with chunked attention. On a CPU, vLLM supports one expert per token there."""

MORE = {
    "axk1": LATENTS | {"topk_method": "noaux_tc", "first_k_dense_replace": 0},
    "deepseek_v2": LATENTS | {"n_group": 1, "topk_group": 1},
    "deepseek_v3": LATENTS | {"topk_method": "noaux_tc"},
    "glm4_moe_lite": LATENTS
    | {"topk_method": "noaux_tc", "first_k_dense_replace": 1, "moe_layer_freq": 1},
    "afmoe": {"score_func": "sigmoid", "route_norm": True, "n_group": 1, "topk_group": 1},
    "falcon": {"ffn_hidden_size": 512},
    "glm4_moe": {"head_dim": 32},
    "granitemoehybrid": {"mamba_n_heads": 4, "mamba_d_head": 64},
    "hy_v3": {"first_k_dense_replace": 1, "expert_hidden_dim": 96},
    **dict.fromkeys(("llama4", "llama4_text"), CHUNKS),
    "kimi_linear": LATENTS,
    "longcat_flash": LATENTS
    | {"mla_scale_q_lora": True, "mla_scale_kv_lora": True, "zero_expert_type": "identity"}
    | {"zero_expert_num": 0},
    "lfm2": {"block_dim": 128, "conv_dim": 128},
    "qwen3_next": GATED,
    "qwen3_5_text": GATED,
    "qwen3_5_moe_text": GATED,
    "nemotron_h": {  # on a CPU, vLLM has no experts of this family
        "layers_block_type": ["linear_attention", "full_attention", "mlp", "full_attention"],
    },
    "minimax_m2": {"rotary_dim": 16, "scoring_func": "softmax", "use_routing_bias": True},
}
"""Family -> further options of its tiny model. vLLM reads some that transformers' configuration
does not have."""

Answers = list[tuple[list[int], list[dict[int, float]]]]
"""Tokens of each answer, and the log probabilities of the likeliest tokens at each step."""


def families() -> list[str]:
    """Return the families of transformers' causal language models for which vLLM has a class."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as NAMES
    from vllm.model_executor.models.registry import ModelRegistry

    known = set(ModelRegistry.get_supported_archs())
    return [name for name, kind in NAMES.items() if kind in known]


def save(family: str, folder: str) -> None:
    """Save a tiny model of the family."""
    import torch
    from family_sizes import build

    def widen(config: Any) -> None:
        for name, size in WIDE.items():
            if isinstance(vars(config).get(name), int):
                setattr(config, name, size)
        for name, value in MORE.get(family, {}).items():
            setattr(config, name, value)

    model = build(family, widen)
    if getattr(model.config, "architectures", None) is None:
        model.config.architectures = [type(model).__name__]
    with torch.no_grad():
        model.save_pretrained(folder)


def answers(
    folder: str, asked: dict[str, Any] | None, dtype: str = "float32"
) -> tuple[Answers, str]:
    """Run an engine, and return its answers, and which of its layers search."""
    import torch
    from vllm import LLM, SamplingParams
    from vllm.config import get_layers_from_vllm_config
    from vllm.distributed import cleanup_dist_env_and_memory
    from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase

    from kvindex_adapters.vllm.engine import PluginAttention

    cleanup_dist_env_and_memory()  # the engine before may have had other process groups
    options: dict[str, Any] = {}
    if asked is not None:
        options = dict(attention_backend="KVINDEX", additional_config={"kvindex": asked})
    llm = LLM(
        folder,
        skip_tokenizer_init=True,
        dtype=dtype,
        enforce_eager=True,
        max_model_len=LENGTH,
        max_num_batched_tokens=LENGTH,
        max_num_seqs=4,
        num_gpu_blocks_override=None if asked is None else 12,
        enable_prefix_caching=False,
        **options,
    )
    ids = [
        torch.randint(3, 100, (n,), generator=torch.Generator().manual_seed(n)).tolist()
        for n in PROMPTS
    ]
    params = SamplingParams(
        temperature=0, max_tokens=STEPS, ignore_eos=True, detokenize=False, logprobs=4
    )
    found = llm.generate([{"prompt_token_ids": one} for one in ids], params, use_tqdm=False)
    outputs = [one.outputs[0] for one in found]
    result = [
        (
            list(one.token_ids),
            [{token: entry.logprob for token, entry in step.items()} for step in one.logprobs],
        )
        for one in outputs
    ]
    layers = get_layers_from_vllm_config(llm.llm_engine.vllm_config, AttentionLayerBase).values()
    own = [layer for layer in layers if isinstance(getattr(layer, "impl", None), PluginAttention)]
    searching = sum(layer.impl.codes is not None for layer in own)
    return result, f"{searching} of {len(own)} layers search"


def distance(some: Answers, others: Answers) -> float:
    """Return the largest difference of log probabilities, or infinity where tokens differ."""
    largest = 0.0
    for (tokens, steps), (other_tokens, other_steps) in zip(some, others, strict=True):
        if tokens != other_tokens:
            return float("inf")
        for step, other in zip(steps, other_steps, strict=True):
            both = step.keys() & other.keys()
            largest = max([largest, *(abs(step[token] - other[token]) for token in both)])
    return largest


def outcome(family: str) -> dict[str, str]:
    """Test one family in this process."""
    dtype = DTYPES.get(family, "float32")
    tolerance = TOLERANCE[dtype]
    with tempfile.TemporaryDirectory() as folder:
        try:
            save(family, folder)
            every, words = answers(folder, EVERY_ROW, dtype)
            one, _ = answers(folder, ONE_ROW, dtype)
            problem = None
        except Exception as error:
            problem = error
        if problem is not None and str(problem).startswith("kvindex: "):
            return {"outcome": REFUSED, "words": spoken(problem)}
        try:
            stock, _ = answers(folder, None, dtype)
        except Exception as error:
            return {"outcome": NONE, "words": spoken(error).replace(folder, "MODEL")[:120]}
        if problem is not None:
            return {"outcome": ERROR, "words": spoken(problem)}
    if (far := distance(stock, every)) > tolerance:
        return {"outcome": DIFFERENT, "words": f"{words}; log probabilities differ by {far:.3g}"}
    if distance(stock, one) <= tolerance:
        return {"outcome": DIFFERENT, "words": f"{words}; one row gives the same results"}
    return {"outcome": EQUAL, "words": words}


def spoken(error: Exception) -> str:
    """Return an error in one line of at most 300 characters."""
    text = " ".join(str(error).split())
    ours = text.startswith("kvindex: ")
    return (text.removeprefix("kvindex: ") if ours else f"{type(error).__name__}: {text}")[:300]


PARTS = ("", "io", "ops", "transforms", "transforms.functional", "transforms.v2")
PARTS += ("transforms.v2.functional",)
"""Modules of torchvision that transformers and vLLM import."""

STAND_IN = """
__version__ = "0.28.0"

class Kind(type):
    def __getattr__(cls, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return f"{cls.__name__}.{name}"

def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)
    return Kind(name, (), {})
"""
"""Content of a module in which every name exists, but does nothing."""


def stand_in(folder: Path) -> None:
    """Write a package that replaces torchvision in models that also read images.

    vLLM imports it with these models, and the package for CUDA cannot be imported with vLLM for
    CPUs. The tool asks no model about an image.
    """
    for part in PARTS:
        path = folder.joinpath("torchvision", *part.split("."))
        path.mkdir(parents=True, exist_ok=True)
        (path / "__init__.py").write_text(STAND_IN, encoding="utf-8")
    package = folder / "torchvision-0.28.0.dist-info"
    package.mkdir()
    text = "Metadata-Version: 2.1\nName: torchvision\nVersion: 0.28.0\n"
    (package / "METADATA").write_text(text, encoding="utf-8")


def ask(families: list[str]) -> Iterator[tuple[str, dict[str, str]]]:
    """Test families in another process, in which vLLM's engines run too, and yield each result.

    If the process or a family fails, another process continues.
    """
    with tempfile.TemporaryDirectory() as folder:
        stand_in(Path(folder))
        yield from _ask(families, os.pathsep.join([*filter(None, [PYTHONPATH]), folder]))


def _ask(families: list[str], path: str) -> Iterator[tuple[str, dict[str, str]]]:
    """Test families as `ask` does, in processes that import from `path`."""
    env = os.environ | {
        "PYTHONPATH": path,
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
    }
    left = list(families)
    while left:
        command = [sys.executable, __file__, "--child", *left]
        process = subprocess.Popen(
            command, env=env, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        found, first = _result(process), True
        while left and found is not None:
            if not first and found["outcome"] in (NONE, ERROR):
                break  # perhaps because of an earlier family, so it gets a process of its own
            yield left.pop(0), found
            found, first = _result(process) if left else None, False
        process.kill()
        status = process.wait()
        if left and first:
            words = f"the process ended with status {status}, or after {LIMIT_S} s"
            yield left.pop(0), {"outcome": NONE, "words": words}


def _result(process: subprocess.Popen[str]) -> dict[str, str] | None:
    """Return the next result that a process prints, or None if it ends or takes too long."""
    watchdog = threading.Timer(LIMIT_S, process.kill)
    watchdog.start()
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("RESULT "):
            watchdog.cancel()
            found: dict[str, str] = json.loads(line.removeprefix("RESULT "))
            return found
    watchdog.cancel()
    return None


def faults(found: dict[str, Any], stored: dict[str, Any]) -> Iterator[str]:
    """Yield a line for each family whose results differ, or that was equal and now is not."""
    for family, now in found.items():
        before = stored.get(family, {}).get("outcome")
        if now["outcome"] in (DIFFERENT, ERROR) or (before == EQUAL and now["outcome"] != EQUAL):
            yield f"{family}: was {before}, is {now['outcome']}: {now['words']}"


def page(found: dict[str, Any], versions: dict[str, str]) -> str:
    """Return the text of `docs/adapters/vllm-families.md`."""
    counts = Counter(one["outcome"] for one in found.values())
    lines = [
        "# Families of vLLM",
        "",
        f"This page says which of {len(found)} model families the [vLLM plug-in](vllm.md) "
        f"supports: those that transformers {versions['transformers']} maps to causal language "
        f"models, and for which vLLM {versions['vllm']} has a class.",
        "",
        "`tools/vllm_families.py` tests each family with a tiny random model on a CPU, and writes "
        f"this page. The model is in float32, or in bfloat16 ({', '.join(DTYPES)}), if vLLM needs "
        "this on a CPU. No option is set, apart from those of the index. Three engines "
        f"read prompts of {', '.join(map(str, PROMPTS))} tokens, and generate {STEPS} tokens each: "
        "vLLM without the plug-in, the plug-in with as many rows as there are, and the plug-in "
        "with one row (a *row* is the key and the value of one token).",
        "",
        *("| outcome | families | meaning |", "|---|---|---|"),
        *(f"| {name} | {counts[name]} | {MEANING[name]} |" for name in MEANING),
        "",
        f"**Equal** means that all tokens are equal, that log probabilities differ by at most "
        f"{TOLERANCE['float32']:g} ({TOLERANCE['bfloat16']:g} in bfloat16), and that they differ "
        "by more if the plug-in retrieves one row. The column *details* counts layers with "
        "attention over keys and values, or over latents. Those that do not search have a sliding "
        "window or chunked attention. Layers of linear attention are not counted.",
        "",
        *("| family | outcome | details |", "|---|---|---|"),
        *(
            f"| {name} | {one['outcome']} | {one['words'].replace('|', '/')} |"
            for name, one in sorted(found.items())
        ),
    ]
    return "\n".join(lines) + "\n"


def main() -> int:
    """Test the families, print what is wrong, and write the page unless `--check` is given."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--only", nargs="+", metavar="NAME", help="names of families (default: all families)"
    )
    parser.add_argument("--check", action="store_true", help="only test; do not write any file")
    parser.add_argument("--child", nargs="+", metavar="NAME", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        for family in options.child:
            print("RESULT", json.dumps(outcome(family)), flush=True)
        return 0
    import transformers
    import vllm

    from kvindex_adapters.evaluate.machine import describe

    stored = json.loads(RESULTS.read_text(encoding="utf-8"))["families"] if RESULTS.exists() else {}
    start, known = time.perf_counter(), families()
    if wrong := set(options.only or ()) - set(known):
        parser.error(f"--only: got {', '.join(sorted(wrong))}, allowed is {', '.join(known)}")
    found: dict[str, Any] = {}
    for family, one in ask(options.only or known):
        found[family] = one
        print(f"{family}: {found[family]['outcome']}: {found[family]['words']}", flush=True)
        if not options.check and not list(faults(found, stored)):
            versions = {"vllm": vllm.__version__, "transformers": transformers.__version__}
            everything = dict(sorted({**stored, **found}.items()))
            RESULTS.write_text(
                json.dumps(
                    {"machine": describe(), "versions": versions, "families": everything}, indent=1
                )
                + "\n",
                encoding="utf-8",
            )
            PAGE.write_text(page(everything, versions), encoding="utf-8")
    counts = dict(Counter(one["outcome"] for one in found.values()))
    print(counts, f"in {time.perf_counter() - start:.0f} s")
    lines = list(faults(found, stored))
    print(*(f"FAULT {line}" for line in lines), sep="\n")
    return bool(lines)


if __name__ == "__main__":
    raise SystemExit(main())
