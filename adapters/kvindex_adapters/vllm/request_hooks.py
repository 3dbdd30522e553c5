"""Patches of vLLM that sparse attention of prompts and KV connectors need. They only affect engines
with the option `prefill="sparse"` or with a connector, and requests that have options of the
plug-in.

- vLLM's input processor checks the options of a request.
- The engine core gives each request a salt for the prefix cache, so that a prefix is never used for
  a request whose prompt is read in another way.
- The scheduler divides prompts into chunks of whole blocks.
- The model runner passes the lengths of the prompts of a batch to the attention layers, which
  otherwise do not know where a prompt ends. In an engine with a KV connector, it passes which
  requests a step admits (see `loaded`).
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from vllm.sampling_params import SamplingParams

from kvindex_adapters.vllm.engine import options_of
from kvindex_adapters.vllm.loaded import Admitted
from kvindex_adapters.vllm.options import Options
from kvindex_adapters.vllm.patches import patch
from kvindex_adapters.vllm.reading import PREFIX, Prompt, Prompts, Reading
from kvindex_adapters.vllm.unsupported import ALIGN, has_connector, refuse

RUNNERS = "vllm.v1.worker.gpu_model_runner", "vllm.v1.worker.gpu.model_runner"
"""Modules with vLLM's two model runners: V1 and V2."""

_running: Prompts | Admitted | None = None
"""What layers read about the requests of the model runner that executes a step at this moment, in
this process."""


def install() -> None:
    """Patch vLLM's input processor, engine core, scheduler and model runners in this process.
    Repeated calls have no effect."""
    processor = importlib.import_module("vllm.v1.engine.input_processor").InputProcessor
    core = importlib.import_module("vllm.v1.engine.core").EngineCore
    scheduler = importlib.import_module("vllm.v1.core.sched.scheduler").Scheduler
    patch(processor, "process_inputs", _checking, __name__)
    patch(core, "preprocess_add_request", _salting, __name__)
    patch(scheduler, "__init__", _switching, __name__)
    patch(scheduler, ALIGN, _aligning, __name__)


def install_runner(config: Any) -> None:
    """Patch the model runner of this process, if its prompts are read with sparse attention or the
    engine has a KV connector. Repeated calls have no effect.

    Args:
        config: The engine's configuration.

    Raises:
        ValueError: The model runner of this version of vLLM does not have the methods to patch.
    """
    runner = importlib.import_module(RUNNERS[config.use_v2_model_runner]).GPUModelRunner
    methods = {"execute_model": _following}
    if config.use_v2_model_runner:
        methods["prepare_attn"] = _listing
    if not methods.keys() <= vars(runner).keys():
        refuse(
            "prefill or kv_transfer_config: got 'sparse' or a connector for a model runner of vLLM "
            f"without the methods {', '.join(methods)}, allowed is 'dense' and None"
        )
    for name, wrap in methods.items():
        patch(runner, name, wrap, __name__)


def sparse_prompts() -> list[Prompt | None]:
    """Return the prompts of the requests of the current batch, in the order of the batch.

    An element is None if the prompt of the request is read with full attention. The list is empty
    outside of a step of a model runner, for example while vLLM measures memory.
    """
    return _running.of_batch() if isinstance(_running, Prompts) else []


def admitted() -> list[int]:
    """Return for each request of the current batch the number of its tokens that were computed
    before this step admits it, in the order of the batch. It is 0 for other requests.

    The list is empty if all are 0, in an engine without a KV connector, and outside of a step of a
    model runner.
    """
    return _running.of_batch() if isinstance(_running, Admitted) else []


def reading_of_request(request: Any, reading: Reading) -> Reading:
    """Return how a request's prompt is read.

    Prompts with images or other media, and those to which the user appends (vLLM's streaming
    input), are read with full attention.

    Args:
        request: vLLM's `EngineCoreRequest` or `Request`.
        reading: The settings of the engine.

    Raises:
        ValueError: An option of the request is not supported.
    """
    params = request.sampling_params
    found = reading.of_request(None if params is None else params.extra_args)
    if found.sparse and (request.mm_features or request.resumable):
        return Reading()
    return found


def _reading(owner: Any) -> Reading | None:
    """Return the settings of the engine to which an object of vLLM belongs, or None for an engine
    that does not use kvindex. They are stored in the object, because it asks often."""
    stored = vars(owner)
    if "kvindex_reading" not in stored:
        options: Options | None = options_of(owner.vllm_config)
        stored["kvindex_reading"] = None if options is None else options.reading
    found: Reading | None = stored["kvindex_reading"]
    return found


def _checking(own: Callable[..., Any]) -> Callable[..., Any]:
    def process_inputs(
        self: Any, request_id: str, prompt: Any, params: Any, *given: Any, **named: Any
    ) -> Any:
        """Check the options of a request, in the process that receives it."""
        reading = _reading(self)
        if reading is not None and isinstance(params, SamplingParams):
            try:
                reading.of_request(params.extra_args)
            except ValueError as error:
                # the server answers with status 400 for this kind of error
                kind = importlib.import_module("vllm.exceptions").VLLMValidationError
                raise kind(f"kvindex: {error}") from error
        return own(self, request_id, prompt, params, *given, **named)

    return process_inputs


def _salting(own: Callable[..., Any]) -> Callable[..., Any]:
    def preprocess_add_request(self: Any, request: Any) -> Any:
        """Set the salt of a request before vLLM computes the hashes of its blocks."""
        reading = _reading(self)
        if reading is not None:
            asked = reading_of_request(request, reading)
            request.cache_salt = asked.salted(request.cache_salt)
            if reading.sparse and not asked.sparse:
                params = request.sampling_params
                given = (params.extra_args or {}).items()
                others = {name: value for name, value in given if not name.startswith(PREFIX)}
                # for the scheduler and the model runner; a dense prompt has no further options
                params.extra_args = {**others, f"{PREFIX}prefill": "dense"}
        return own(self, request)

    return preprocess_add_request


def _switching(own: Callable[..., Any]) -> Callable[..., Any]:
    def construct(self: Any, *given: Any, **named: Any) -> None:
        """Let the scheduler call `_mamba_block_aligned_split` for each chunk of a prompt."""
        own(self, *given, **named)
        vars(self)["kvindex_hybrid"] = vars(self).get("need_mamba_block_aligned_split", False)
        reading = _reading(self)
        if reading is not None and reading.sparse:
            self.need_mamba_block_aligned_split = True

    return construct


def _aligning(own: Callable[..., Any]) -> Callable[..., Any]:
    def align(self: Any, request: Any, new: int, *cached: int, **named: int) -> int:
        """Return the number of tokens of a chunk, at most `new`. `cached` and `named` have the
        numbers of cached tokens before it that `request` does not include yet."""
        if vars(self).get("kvindex_hybrid", True):
            new = own(self, request, new, *cached, **named)
        reading = _reading(self)
        if reading is None or not reading.sparse:
            return new
        reading = reading_of_request(request, reading)
        if not reading.sparse:
            return new
        start = request.num_computed_tokens + sum(cached) + sum(named.values())
        prompt = Prompt(request.num_prompt_tokens, reading)
        return prompt.chunk_end(start, start + new) - start

    return align


def _follower(runner: Any) -> Prompts | Admitted | None:
    """Return what follows the requests of a model runner, or None if its layers do not need it. It
    is stored in the runner."""
    stored = vars(runner)
    if "kvindex_follower" not in stored:
        reading = _reading(runner)

        def batch() -> Any:
            # the V2 runner lists the requests of a batch in `prepare_attn`
            return runner.input_batch.req_ids

        found: Prompts | Admitted | None = None
        if reading is not None and reading.sparse:
            found = Prompts(reading, batch)
        elif reading is not None and has_connector(runner.vllm_config):
            found = Admitted(batch)
        stored["kvindex_follower"] = found
    follower: Prompts | Admitted | None = stored["kvindex_follower"]
    return follower


def _following(own: Callable[..., Any]) -> Callable[..., Any]:
    def execute_model(self: Any, scheduled: Any, *given: Any, **named: Any) -> Any:
        """Execute a step while `sparse_prompts` returns its prompts, or `admitted` the requests
        that it admits."""
        global _running
        dummy = named.get("dummy_run") or (len(given) > 1 and given[1])
        follower = None if dummy else _follower(self)
        if follower is None:
            return own(self, scheduled, *given, **named)
        follower.update(scheduled)
        before, _running = _running, follower
        try:
            return own(self, scheduled, *given, **named)
        finally:
            _running = before

    return execute_model


def _listing(own: Callable[..., Any]) -> Callable[..., Any]:
    def prepare_attn(self: Any, input_batch: Any) -> Any:
        """Store the order of the requests of a batch."""
        if _running is not None:
            _running.batch = lambda: input_batch.req_ids
        return own(self, input_batch)

    return prepare_attn
