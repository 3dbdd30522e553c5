"""`KVIndexLM`: a transformers model with an index, as a model of lm-evaluation-harness."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import torch
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from tqdm import tqdm

from kvindex.core import check
from kvindex.layer.arguments import DEFAULT_K
from kvindex_adapters.hf.attach import attach
from kvindex_adapters.hf.generate import check_full_attention, generate
from kvindex_adapters.hf.generation.prefill import read
from kvindex_adapters.hf.generation.tokenizer import punctuated
from kvindex_adapters.hf.model.load_model import load
from kvindex_adapters.hf.unsupported import check_model
from kvindex_adapters.lm_eval.scoring import Score, scores

ONE = ("1", "auto")
"""Allowed batch sizes: each request is a sequence of its own."""

SAMPLING = ("do_sample", "temperature", "top_p", "top_k", "min_p", "repetition_penalty")
"""Options of a task's `generation_kwargs` that are passed to `model.generate`."""

MOST = 4096
"""Largest length of a sequence, if the model's configuration does not state one."""


@register_model("kvindex")
class KVIndexLM(TemplateLM):
    """A transformers model whose decode steps search an index.

    Args:
        pretrained: The model, as in `kvhf.load_model`: a folder, a hub id, a GGUF file or
            "smollm2".
        index: Name and options of the index, or "none" for full attention.
        k: Number of rows that a decode step retrieves per KV head, or "auto".
        dtype: Data type of the model.
        device: Device of the model. None for "cuda" if there is a GPU, otherwise "cpu".
        gguf_file: Name of a GGUF file in `pretrained`, or None.
        lora: File with a LoRA adapter to merge into the weights, or None.
        batch_size: Must be 1 or "auto", because each request is a sequence of its own.
        max_batch_size: Has no effect.
        max_length: Largest number of tokens of a sequence, or None for that of the model. The
            beginning of a longer context is left out.
        max_gen_toks: Number of tokens of an answer, if a task does not set it.
        options: Further options of `attach`, for example `sink` or `local_window`. `dense_below` is
            0 by default, so that every step searches.

    Raises:
        ValueError: A value is not allowed, or `kvhf.load_model` or `attach` refuses it.
        TypeError: An option does not exist.
    """

    def __init__(
        self,
        pretrained: str = "smollm2",
        index: str = "pariskv",
        k: int | str = DEFAULT_K,
        *,
        dtype: str = "float32",
        device: str | None = None,
        gguf_file: str | None = None,
        lora: str | None = None,
        batch_size: int | str = 1,
        max_batch_size: int | None = None,
        max_length: int | None = None,
        max_gen_toks: int = 256,
        **options: Any,
    ) -> None:
        super().__init__()
        if str(batch_size).partition(":")[0] not in ONE:
            raise ValueError(
                f"batch_size: got {batch_size}, allowed is 1, because each request is a sequence "
                "of its own"
            )
        _check_options(options)
        self._max_gen_toks = check.at_least("max_gen_toks", max_gen_toks, 1)
        if device is None:
            device = "cuda" if torch.cuda.is_available() else "cpu"
        file = None if lora is None else Path(lora)
        self.model, self.tokenizer = load(
            pretrained, gguf_file=gguf_file, lora=file, dtype=dtype, device=device
        )
        self._name = str(pretrained)
        config = self.model.config.get_text_config(decoder=True).to_dict()
        most = config.get("max_position_embeddings") or MOST
        if max_length is not None and check.at_least("max_length", max_length, 2) > most:
            raise ValueError(
                f"max_length: got {max_length}, allowed is 2 to {most}, the model's maximum length"
            )
        self._max_length = max_length or most
        self._options = self._attach_options(index, k, options)

    def _attach_options(
        self, index: str, k: int | str, options: dict[str, Any]
    ) -> dict[str, Any] | None:
        """Return the keyword arguments of `attach`, or None for full attention.

        Raise ValueError or TypeError if `attach` refuses them.
        """
        if index == "none":
            check_full_attention(k, options)
            return None
        check_model(self.model)
        usual: dict[str, Any] = {"dense_below": 0, **options}
        made = {"index": index, "k": k, **punctuated(index, self.tokenizer, usual)}
        with attach(self.model, **made):
            return made

    # What the harness asks about the model

    @property
    def eot_token_id(self) -> int:
        """Id of the token that ends a text."""
        return int(self.tokenizer.eos_token_id)

    @property
    def prefix_token_id(self) -> int:
        """Id of the token before a text without a context."""
        first = self.tokenizer.bos_token_id
        return self.eot_token_id if first is None else int(first)

    @property
    def max_length(self) -> int:
        """Largest number of tokens of a sequence."""
        return self._max_length

    @property
    def max_gen_toks(self) -> int:
        """Largest number of tokens of an answer, if a task does not set it."""
        return self._max_gen_toks

    @property
    def tokenizer_name(self) -> str:
        """Name of the tokenizer, by which the harness stores requests."""
        return self._name.replace("/", "__")

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """Convert messages to text with the chat template of the tokenizer."""
        text: str = self.tokenizer.apply_chat_template(
            chat_history,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=not add_generation_prompt,
        )
        return text

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **unused: Any
    ) -> list[int]:
        """Convert a text to token ids. By default without special tokens."""
        special = bool(add_special_tokens)
        ids: list[int] = self.tokenizer(string, add_special_tokens=special)["input_ids"]
        return ids

    # Requests

    def _loglikelihood_tokens(
        self,
        requests: Sequence[tuple[Any, list[int], list[int]]],
        disable_tqdm: bool = False,
        **unused: Any,
    ) -> list[Score]:
        """Score continuations. The model reads a context only once for all its continuations."""
        contexts: dict[tuple[int, ...], list[int]] = {}
        for number, (_, context, continuation) in enumerate(requests):
            if len(continuation) > self.max_length:
                raise ValueError(
                    f"continuation: got {len(continuation)} tokens, allowed is at most "
                    f"{self.max_length}, the maximum length of a sequence"
                )
            room = self.max_length + 1 - len(continuation)
            contexts.setdefault(tuple(context[-room:]), []).append(number)
        found: dict[int, Score] = {}
        for context, numbers in self._bar(contexts.items(), disable_tqdm, "scoring contexts"):
            texts = [requests[number][2] for number in numbers]
            made = scores(self.model, self._options, context, texts)
            found |= dict(zip(numbers, made, strict=True))
            for number in numbers:
                if requests[number][0] is not None:
                    self.cache_hook.add_partial("loglikelihood", requests[number][0], found[number])
        return [found[number] for number in range(len(requests))]

    def loglikelihood_rolling(
        self, requests: Sequence[Any], disable_tqdm: bool = False
    ) -> list[float]:
        """Score whole texts. Each token of a text is a decode step."""
        found = []
        for request in self._bar(requests, disable_tqdm, "scoring texts"):
            (text,) = request.args
            windows = get_rolling_token_windows(
                token_list=self.tok_encode(text),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length,
                context_len=1,
            )
            total = 0.0
            for context, continuation in map(make_disjoint_window, windows):
                ((score, _),) = scores(self.model, self._options, context, [continuation])
                total += score
            found.append(total)
            self.cache_hook.add_partial("loglikelihood_rolling", (text,), total)
        return found

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Generate answers. All tokens, the first one included, come from decode steps."""
        found = []
        for request in self._bar(requests, disable_tqdm, "generating"):
            context, given = request.args
            text = self._generated(context, dict(given))
            found.append(text)
            self.cache_hook.add_partial("generate_until", (context, given), text)
        return found

    def _generated(self, context: str, given: dict[str, Any]) -> str:
        until = given.pop("until", None)
        stops = [until] if isinstance(until, str) else list(until or [])
        count = int(given.pop("max_gen_toks", self.max_gen_toks))
        options = {name: given.pop(name) for name in SAMPLING if name in given}
        if not options.get("do_sample") or options.get("temperature") == 0:
            options = {}  # greedy: transformers warns about options of sampling
        if given:
            raise ValueError(
                f"generation_kwargs: got {', '.join(sorted(given))}, allowed are until, "
                f"max_gen_toks, {', '.join(SAMPLING)}"
            )
        room = self.max_length - count
        if room < 1:
            raise ValueError(
                f"max_gen_toks: got {count}, allowed is below {self.max_length}, the maximum "
                "length of a sequence"
            )
        ids = torch.tensor((self.tok_encode(context) or [self.prefix_token_id])[-room:])
        if stops:
            options["stop_strings"] = stops
        options["max_new_tokens"] = count
        if self._options is None:
            answer = generate(self.model, self.tokenizer, ids, index=None, **options)
        else:
            with attach(self.model, **self._options) as cache:
                how: dict[str, Any] = {"cache": cache}
                if len(ids) > 1:  # the last token of the prompt is a decode step, which searches
                    read(self.model, self.tokenizer, ids[:-1], cache=cache)
                    how["used"] = "continue"
                    ids = ids[-1:]
                answer = generate(self.model, self.tokenizer, ids, **how, **options)
        text = answer.text
        for stop in stops:
            text = text.partition(stop)[0] if stop else text
        return text

    def _bar(self, items: Iterable[Any], disable: bool, name: str) -> Iterable[Any]:
        return tqdm(items, disable=disable or self.rank != 0, desc=f"kvindex: {name}")


def _check_options(options: dict[str, Any]) -> None:
    """Raise TypeError if an option is neither one of this class nor one of `attach`."""
    known = [name for name in inspect.signature(attach).parameters if name != "model"]
    own = [name for name in inspect.signature(KVIndexLM.__init__).parameters if name != "self"]
    for name in options:
        if name not in known:
            near = get_close_matches(name, [*known, *own], n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise TypeError(
                f"model_args: got {name!r}, which is no option of this model type{hint}"
            )
