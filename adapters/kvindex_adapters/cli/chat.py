"""`kvindex chat`: talk with a model in the terminal, optionally about documents."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext, suppress
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvindex_adapters.cli.early import (
    DTYPES,
    ENGINES,
    VERIFIERS,
    check_lora,
    check_model,
    check_name,
    read_text,
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
from kvindex_adapters.common.saved_chat import check_saved_chat

if TYPE_CHECKING:
    from kvindex_adapters.hf.chat import BaseChat

COMMANDS = """\
/save FOLDER   write the conversation and its KV cache to a new folder
/load FOLDER   continue a saved conversation instead of this one
/stats         tokens, rows read and memory
/undo          remove the last question and its answer; to ask two follow-up questions from one
               state, ask the first, type /undo, and ask the second
/quit          end the chat (so does the end of the input)"""

NAMES = re.findall(r"^/\w+", COMMANDS, re.MULTILINE)
"""Names of the commands that `/help` lists."""


def chat(
    documents: Annotated[
        list[Path] | None,
        typer.Argument(help="Text files that the model reads before the first question."),
    ] = None,
    model: Model = "smollm2-long",
    system: Annotated[
        str | None, typer.Option(help="Text of the system message of a new chat.")
    ] = None,
    load: Annotated[
        Path | None, typer.Option(help="Folder of a conversation that /save has written.")
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
    max_new_tokens: Annotated[int, typer.Option(help="Longest answer, in tokens.")] = 512,
    temperature: Annotated[
        float | None,
        typer.Option(
            help="Sample tokens, with logits divided by this temperature (default: choose the "
            "most likely token)."
        ),
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed for sampling.")] = 0,
    speculative_tokens: SpeculativeTokens = None,
    verify: Verify = "index",
    draft_model: DraftModel = None,
    engine: Engine = None,
    dtype: Dtype = "float32",
    device: Device = "cpu",
) -> None:
    """Talk with a model. Its KV cache stays between turns, and an index searches it.

    Type a question and press Enter. /help lists the commands, for example /save and /undo.
    """
    check_stdout()
    check_model(model)
    if draft_model is not None:
        check_model(draft_model, "draft_model")
    check_name("dtype", dtype, DTYPES)
    check_name("engine", engine, ENGINES)
    check_name("verify", verify, VERIFIERS)
    check_lora(lora)
    if load is not None:
        check_saved_chat(load, "load")
        if system is not None:
            raise ValueError(
                f"system: got {system!r} together with --load, but a saved chat has a system "
                "message of its own, or none; leave out --system"
            )
    texts = [read_text(path, "documents") for path in documents or ()]
    announce_imports()
    import torch

    from kvindex.core import check
    from kvindex_adapters.cli import common
    from kvindex_adapters.cli import engine as engines
    from kvindex_adapters.cli.progress import console
    from kvindex_adapters.hf.chat import read_saved
    from kvindex_adapters.hf.model import load_model

    number = common.check_dtype(dtype)
    load_model.check_device(device)
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
    common.check_size("max_new_tokens", max_new_tokens, 1)
    check.seed(seed)
    speculation = common.speculation(speculative_tokens, verify, index, draft_model)
    options = common.sampling(
        False,
        temperature=temperature,
        top_p=None,
        top_k=None,
        min_p=None,
        repetition_penalty=None,
    )
    engine = engines.check_engine(engine)
    if load is not None:
        read_saved(load, "load")
    console.print("loading the model")  # transformers shows its own progress bars
    loaded, tokenizer = load_model.load(
        model, gguf_file=gguf_file, lora=lora, dtype=number, device=device
    )
    given: dict[str, Any] = {"index": None}
    if index != "none":
        common.wait_for_compiler(index, device)  # compilation began in `check_attention`
        given = dict(index=index, k=k, attach_options=regions)
    draft = None
    if draft_model is not None:
        console.print("loading the draft model")
        draft = load_model.load(draft_model, dtype=number, device=device)
    torch.manual_seed(seed)
    chosen = engines.choose(engine, loaded, tokenizer, options, seed, draft=draft)
    opened = chosen.chat(system=system, max_new_tokens=max_new_tokens, **speculation, **given)
    context: Any = opened if isinstance(opened, AbstractContextManager) else nullcontext()
    with context:
        if load is not None:
            opened.load(load)
            console.print(f"loaded {opened.tokens} tokens", markup=False)
        _read(opened, texts)
        for line in _lines():
            try:
                if not _turn(opened, line):
                    break
            except (ValueError, TypeError, OSError) as error:  # the failed line changed nothing
                print(f"error: {error}", file=sys.stderr)
            except KeyboardInterrupt:
                print("\n(stopped: the conversation is as it was before the question)", flush=True)


def _lines() -> Iterator[str]:
    """Yield the lines that the user types, until the input ends."""
    live = sys.stdin.isatty()
    if live:
        with suppress(ImportError):  # where readline exists, lines can be edited
            import readline  # noqa: F401
        print("Ask a question. /help lists the commands.", file=sys.stderr)
    while True:
        try:
            line = input("> ") if live else sys.stdin.readline()
        except (EOFError, KeyboardInterrupt):
            return
        if not live and not line:
            return
        if line.strip():
            yield line.strip()


def _read(opened: BaseChat, texts: list[str]) -> None:
    """Read documents into the chat, and show a bar for each."""
    from kvindex_adapters.cli.progress import bars, console

    for number, text in enumerate(texts, start=1):
        with bars() as progress:
            name = f"reading document {number} of {len(texts)}"
            opened.read(text, on_progress=lambda _, *done, name=name: progress.update(name, *done))
    if texts:
        console.print(
            f"{opened.tokens} tokens read; each question reads only its own", markup=False
        )


def _turn(opened: BaseChat, line: str) -> bool:
    """Run a command or send a question. Return False to end the chat."""
    command, _, rest = line.partition(" ")
    rest = rest.strip()
    if command in ("/save", "/load") and not rest:
        raise ValueError(f"{command}: got no folder; write {command} FOLDER")
    if command == "/quit":
        return False
    if command == "/help":
        print(COMMANDS)
    elif command == "/save":
        opened.save(rest)
        print(f"saved {len(opened.messages)} messages and their KV cache in {rest}")
    elif command == "/load":
        opened.load(rest)
        print(f"loaded {opened.tokens} tokens and {len(opened.messages)} messages")
    elif command == "/stats":
        print(opened.report())
    elif command == "/undo":
        removed = opened.undo()
        print(f"removed {len(removed)} messages")
    elif command.startswith("/"):
        near = get_close_matches(command, [*NAMES, "/help"], n=1)
        question = f"did you mean {near[0]}? " if near else ""
        raise ValueError(f"command: got {command}; {question}/help lists the commands")
    else:
        _ask(opened, line)
    return True


def _ask(opened: BaseChat, question: str) -> None:
    """Send a question. Print the answer while it is generated, and then how long it took."""
    from transformers import TextStreamer

    from kvindex_adapters.cli.progress import console

    streamer = TextStreamer(opened.tokenizer, skip_prompt=True, skip_special_tokens=True)
    generation = opened.send(question, streamer=streamer)
    new = len(generation.prompt_ids)
    console.print(
        f"read {new} tokens in {generation.prefill_s:.1f} s ({opened.reused} were stored), then "
        f"{generation.token_s * 1000:.0f} ms per token",
        markup=False,
        style="dim",
    )
