"""`kvindex generate`: a user's own model answers a user's own text through an index."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import torch
import typer
from transformers import TextStreamer

from kvindex import check
from kvindex_adapters.cli.inputs import (
    INDEX,
    check_device,
    check_dtype,
    check_search,
    read_text,
)
from kvindex_adapters.cli.progress import bars, console
from kvindex_adapters.files import check_output, write_json
from kvindex_adapters.hf.generation import generate as run
from kvindex_adapters.machine import describe
from kvindex_adapters.models import load


def generate(
    model: Annotated[str, typer.Option(help="Folder, .gguf file or hub id of the model.")],
    prompt_file: Annotated[Path, typer.Option(help="Text file with the prompt.")],
    gguf_file: Annotated[str | None, typer.Option(help="Name of the GGUF file inside it.")] = None,
    index: Annotated[str, typer.Option(help=INDEX + "; 'none' for full attention.")] = "pariskv",
    k: Annotated[int, typer.Option("-k", help="Rows retrieved per KV head and step.")] = 100,
    max_new_tokens: Annotated[int, typer.Option(help="Longest answer, in tokens.")] = 256,
    chat: Annotated[bool, typer.Option(help="Put the prompt into the chat template.")] = False,
    sample: Annotated[bool, typer.Option(help="Sample instead of the most likely token.")] = False,
    seed: Annotated[int, typer.Option(help="Seed for sampling.")] = 0,
    dtype: Annotated[str, typer.Option(help="float32, float16 or bfloat16.")] = "float32",
    device: Annotated[str, typer.Option(help="cpu, or cuda.")] = "cpu",
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write the result and the machine here.")
    ] = None,
) -> None:
    """Generate from a prompt through an index; tokens appear as they come."""
    number = check_dtype(dtype)
    check_device(device)
    check.at_least("max_new_tokens", max_new_tokens, 1)
    if index != "none":
        check_search(index, k, device)
    check_output("json", json_file)
    text = read_text(prompt_file)
    console.print("loading the model")  # transformers shows bars of its own
    loaded, tokenizer = load(model, gguf_file=gguf_file, dtype=number, device=device)
    torch.manual_seed(seed)
    with bars() as progress:

        def report(phase: str, done: int, total: int) -> None:
            if phase == "prefill":
                progress.update("reading the prompt", done, total)
                if done == total:  # the answer follows, which shows itself how decoding goes
                    progress.stop()

        result = run(
            loaded,
            tokenizer,
            [{"role": "user", "content": text}] if chat else text,
            index=None if index == "none" else index,
            k=k,
            max_new_tokens=max_new_tokens,
            streamer=TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True),
            on_progress=report,
            do_sample=sample,
        )
    console.print(
        f"{len(result.prompt_ids)} prompt tokens in {result.prefill_s:.1f} s, then "
        f"{result.token_s * 1000:.0f} ms per token. {result.report or 'Full attention.'}"
    )
    if json_file:
        written = {
            "model": model,
            "index": index,
            "k": k,
            "prompt_tokens": len(result.prompt_ids),
            "answer": result.text,
            "prefill_s": result.prefill_s,
            "token_s": result.token_s,
            "machine": describe(device),
        }
        if result.report:
            written["backend"] = result.backend
            written["rows_read_fraction"] = result.report.rows_read_fraction
            written["nbytes"] = result.report.nbytes
        write_json(json_file, written, indent=2)
