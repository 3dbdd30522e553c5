"""`kvindex generate`: answer a prompt with a given model, whose attention searches an index."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvindex_adapters.cli.early import (
    DTYPES,
    ENGINES,
    VERIFIERS,
    check_lora,
    check_model,
    check_name,
    check_questions,
    prompt_of,
)
from kvindex_adapters.cli.options import (
    INDEX,
    DenseBelow,
    Device,
    DraftModel,
    Dtype,
    Engine,
    Error,
    GgufFile,
    JsonFile,
    K,
    Local,
    Lora,
    Model,
    Prefill,
    PrefillMass,
    PrefillSelector,
    Sink,
    SpeculativeTokens,
    UpdateEvery,
    Verify,
    announce_imports,
    check_stdout,
)


def generate(
    model: Model,
    prompt: Annotated[str | None, typer.Option(help="Text of the prompt.")] = None,
    prompt_file: Annotated[
        Path | None, typer.Option(help="Text file with the prompt; - reads standard input.")
    ] = None,
    ask: Annotated[
        list[str] | None,
        typer.Option(
            help="Question about the prompt. Repeat the option for several questions; the prompt "
            "is read only once, also with --index none."
        ),
    ] = None,
    save_cache: Annotated[
        Path | None,
        typer.Option(
            help="New folder in which the prompt's KV cache is saved. A later command can load it "
            "with --load-cache."
        ),
    ] = None,
    load_cache: Annotated[
        Path | None,
        typer.Option(
            help="Folder with a KV cache that --save-cache wrote. The prompt must begin with the "
            "text of that cache, which the model does not read again."
        ),
    ] = None,
    gguf_file: GgufFile = None,
    lora: Lora = None,
    index: Annotated[str, typer.Option(help=f"{INDEX}, or none for full attention.")] = "pariskv",
    k: K = 256,
    error: Error = None,
    sink: Sink = 64,
    local_window: Local = 256,
    update_every: UpdateEvery = 256,
    dense_below: DenseBelow = 2048,
    prefill: Prefill = "dense",
    prefill_mass: PrefillMass = 0.95,
    prefill_selector: PrefillSelector = "sampled",
    max_new_tokens: Annotated[
        int, typer.Option(help="Maximum length of an answer in tokens.")
    ] = 256,
    chat: Annotated[
        bool, typer.Option(help="Apply the model's chat template to the prompt.")
    ] = False,
    system: Annotated[
        str | None,
        typer.Option(help="Text of a system message before the prompt; implies --chat."),
    ] = None,
    sample: Annotated[
        bool, typer.Option(help="Sample tokens instead of choosing the most likely one.")
    ] = False,
    temperature: Annotated[
        float | None,
        typer.Option(
            help="Sample tokens after dividing the logits by this temperature. A value below 1 "
            "favors likely tokens."
        ),
    ] = None,
    top_p: Annotated[
        float | None,
        typer.Option(
            help="Sample from the smallest set of most likely tokens whose probabilities add up "
            "to at least this value."
        ),
    ] = None,
    top_k: Annotated[
        int | None, typer.Option(help="Sample only from the given number of most likely tokens.")
    ] = None,
    min_p: Annotated[
        float | None,
        typer.Option(
            help="Sample only from tokens whose probability is at least this fraction of the "
            "probability of the most likely token."
        ),
    ] = None,
    repetition_penalty: Annotated[
        float | None,
        typer.Option(
            help="Penalty of tokens that have occurred before, as in transformers. A value above 1 "
            "makes these tokens less likely."
        ),
    ] = None,
    seed: Annotated[int, typer.Option(help="Random seed for sampling tokens.")] = 0,
    speculative_tokens: SpeculativeTokens = None,
    verify: Verify = "index",
    draft_model: DraftModel = None,
    engine: Engine = None,
    token_graph: Annotated[
        bool | None,
        typer.Option(
            help="Run each decode step of transformers as one CUDA graph (default: yes, if the "
            "model is on a GPU and supports it)."
        ),
    ] = None,
    weights: Annotated[
        str,
        typer.Option(
            help="Precision of the model's weights: plain (unchanged), or fp8 (8-bit copies, only "
            "with --engine decoder)."
        ),
    ] = "plain",
    dtype: Dtype = "float32",
    device: Device = "cpu",
    json_file: JsonFile = None,
) -> None:
    """Answer a prompt with a model whose attention searches an index.

    Tokens are printed while they are generated.
    """
    check_stdout()
    check_model(model)
    if draft_model is not None:
        check_model(draft_model, "draft_model")
    check_name("dtype", dtype, DTYPES)
    check_name("engine", engine, ENGINES)
    check_name("verify", verify, VERIFIERS)
    check_lora(lora)
    questions, text = check_questions(ask), prompt_of(prompt, prompt_file)
    announce_imports()
    import torch

    from kvindex.core import check
    from kvindex_adapters.cli import answers, common
    from kvindex_adapters.cli import engine as engines
    from kvindex_adapters.cli.progress import console
    from kvindex_adapters.common import parallel
    from kvindex_adapters.evaluate.output_files import check_output, write_json
    from kvindex_adapters.hf.model import load_model
    from kvindex_adapters.llama.heads import HeadRanks

    number = common.check_dtype(dtype)
    load_model.check_device(device)
    together = parallel.launched()
    if together:
        common.check_alone(save_cache, load_cache, draft_model=draft_model)
        device = parallel.join(device)
        engine = engine or ("transformers" if weights == "plain" else "decoder")
        console.quiet = parallel.rank()[0] > 0
    regions = dict(
        sink=sink,
        local_window=local_window,
        update_every=update_every,
        dense_below=dense_below,
        prefill=prefill,
        prefill_mass=prefill_mass,
        prefill_selector=prefill_selector,
        **({} if error is None else {"error": error}),
    )
    common.check_attention(index, k, device, regions)
    request = answers.Request(
        index=None if index == "none" else index,
        k=k,
        regions=regions,
        chat=chat or system is not None,
        system=system,
        max_new_tokens=common.check_size("max_new_tokens", max_new_tokens, 1),
        save_cache=save_cache,
        load_cache=load_cache,
        token_graph=token_graph,
        speculation=common.speculation(speculative_tokens, verify, index, draft_model),
        options=common.sampling(
            sample,
            temperature=temperature,
            top_p=top_p,
            top_k=top_k,
            min_p=min_p,
            repetition_penalty=repetition_penalty,
        ),
    )
    check.seed(seed)
    check_output("json", json_file)
    engine = engines.check_engine(engine, weights, keeps_cache=request.keeps_cache)
    common.check_folders(request.index, save_cache, load_cache)
    if token_graph and index == "none":
        raise ValueError(
            "token_graph: got True with --index none, which runs no CUDA graphs; pass an index or "
            "--no-token-graph"
        )
    console.print("loading the model")  # transformers shows its own progress bars
    heads = together and "sharded" not in (part.partition(":")[0] for part in index.split("+"))
    ranks = HeadRanks.of(device) if heads and engine == "decoder" else None
    alone = ranks is None  # with several ranks, each rank copies its shard from host memory
    loaded, tokenizer = load_model.load(
        model,
        gguf_file=gguf_file,
        lora=lora,
        dtype=number,
        device=device if alone else "cpu",
        heads=heads and alone,
    )
    draft = None
    if draft_model is not None:
        console.print("loading the draft model")
        draft = load_model.load(draft_model, dtype=number, device=device)
    torch.manual_seed(seed)
    given = engine, loaded, tokenizer, request.options, seed, weights, ranks
    chosen = engines.choose(*given, draft=draft)
    if weights != "plain" or not alone:
        loaded = None  # free the original matrices, which the decoder has copied
    result = answers.answer(tokenizer, text, questions, request, chosen)
    if json_file and parallel.rank()[0] == 0:
        written = answers.to_json(result, request, model, device, chosen.name)
        written |= {} if draft_model is None else {"draft_model": draft_model}
        write_json(json_file, {**written, "weights": weights}, indent=2)
    if together:
        parallel.leave()
