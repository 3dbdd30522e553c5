"""Worker process of `compare_trees.py`: times decode steps of one checkout, or hashes its results.

PYTHONPATH points to the checkout, so the worker imports all modules from there. It uses only
modules that have the same name in old and new checkouts. (The code calls a checkout a tree.)

The worker reads commands from standard input. Each command is one line with a JSON list: its name
and its arguments. The worker answers each command with one line of JSON: the result, or `error`.

Commands contain specs (names and options of indexes) with the current names of options. For an
older checkout, `spec_of_tree` translates them to the names that this checkout uses.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TextIO

import torch
from torch import Tensor

import benchmarks
import kvindex
import kvindex_cuda
from benchmarks import append
from benchmarks.common import token, workload
from benchmarks.common.correctness import check
from benchmarks.common.decoding import UPDATE, Decoding
from benchmarks.common.shapes import SHAPES, weights_of
from benchmarks.common.timing import GraphTimer, Timed, quartiles
from kvindex.core.capability import capability
from kvindex.core.geometry import Geometry
from kvindex.core.protocol import Attends, KVIndex, ObservesQueries
from kvindex.core.resident import ResidentRows
from kvindex.layer import AttentionLayer
from kvindex.pariskv.config import ParisKVConfig
from kvindex.registry import wrapper_options
from kvindex_adapters.evaluate.machine import describe

COMMANDS = ("check", "build", "round", "digests")
"""Commands that may follow the first one, `start`."""

OLD_NAMES = {
    "preset=sampled": "preset=drawn",
    "sampling=none": "draw=none",
    "sampling=priority": "draw=priority",
    "sampling=tempered": "draw=tempered",
    "sign_decoder=regression": "signs=together",
    "sign_decoder=mean": "signs=alone",
    "coarse=sign_votes": "coarse=dots",
    "coarse=tiered_votes": "coarse=tiers",
}
"""Current name of an option of an index -> its name in older checkouts."""

OTHER_SPECS = (
    "pariskv:preset=paper:coarse=tiered_votes:candidates_per=group",
    "pariskv:preset=fast:coarse=sign_votes:sign_decoder=regression",
    "pariskv:sampling=priority:sign_decoder=mean",
    "pariskv:sampling=tempered:group=max_share",
    *(f"pariskv:row_codec={codec}" for codec in ("int8", "fp8", "int4", "int2")),
)
"""Indexes to compare in addition to every index, preset and wrapper."""

WRAPPERS = ("sample", "reuse", "recall", "vattention")
"""Wrappers with which every index is compared."""

CHUNKS = {True: (900, 500), False: (300, 100)}
"""Numbers of tokens in the two chunks that are appended to an index: True for ParisKV, False for
other indexes. ParisKV needs more tokens, because it selects at least 1,024 candidates."""

FOUND, DECODED = 16, 30
"""Number of rows that a search returns, and number of decode steps of a layer."""

PADDED = 5
"""Number of padding tokens at the start of the second sequence."""

LAYERS: dict[str, dict[str, Any]] = {
    "often": dict(prompt=200, update_every=8, sink=8),
    "blocks": dict(prompt=530, update_every=256, sink=64, update_phase=38 / 256),
}
"""Name -> prompt length and options of an attention layer whose results are compared.

In each of these layers, tokens move from the window into the index while the layer decodes. In
`often`, 8 tokens move every 8 decode steps. In `blocks`, 256 tokens move once, at a length of 550
tokens: the second block of an index that encodes 256 tokens together.
"""


def spec_of_tree(spec: str, *, back: bool = False) -> str:
    """Translate the options of an index from their current names to the names in this checkout.

    The names differ if the checkout is from before a renaming. With `back`, translate from the
    names in this checkout to the current names.
    """
    if "sampling" in {part.name for part in fields(ParisKVConfig)}:
        return spec
    names = {old: new for new, old in OLD_NAMES.items()} if back else OLD_NAMES
    return "".join(names.get(part, part) for part in re.split("([:+])", spec))


@dataclass
class Bench:
    """Times decode steps of one checkout.

    Each public method runs one command of `COMMANDS`, and returns the answer.
    """

    timed: Timed
    geometry: Geometry
    index: str = "pariskv"
    hit_rate: float = 0.9
    batch: int = 1
    layers: int = 16
    trees: int = 1  # number of checkouts whose processes share the GPU's memory
    sizes: dict[str, Any] = field(default_factory=dict)  # further arguments of `Layers`
    tokens: int = 0
    works: dict[str, Any] = field(default_factory=dict)  # what to time, by its name in `--times`

    def check(self) -> dict[str, Any]:
        """Check the results of a decode step. Raises SystemExit if they are wrong."""
        return {"check": check(self.geometry, self.index, **self.sizes)}

    def build(self, tokens: int, places: list[str]) -> dict[str, Any]:
        """Build the layers that are timed, with `tokens` tokens in each index.

        Args:
            tokens: Number of tokens in each index.
            places: Values of the option `--times`, which say what will be timed.

        Raises:
            SystemExit: The results of a layer are wrong.
        """
        self.tokens, self.works = tokens, {}
        workload.free()
        g, share = self.geometry, 0.4 / self.trees
        layers = workload.layers_that_fit(g, tokens, self.batch, self.layers, share) or 1
        sizes = dict(tokens=tokens, batch=self.batch, layers=layers, **self.sizes)
        for place in dict.fromkeys(p.replace("cached", "host") for p in places):
            if place in ("host", "device"):
                self.works[place] = workload.Layers(g, self.index, place, **sizes)
                self.works[place].answers()
        if "update" in places:
            self.works["update"] = Decoding(g, self.index, tokens, layers)
            append.steps(self.works["update"], UPDATE)
        found: dict[str, Any] = {"layers": layers}
        if "token" in places:
            found["sharpness"] = self._build_decoder(tokens)
        return found

    def _build_decoder(self, tokens: int) -> float:
        """Create a decoder of Qwen3-8B's size, and store it in `self.works["token"]`.

        Attention logits are multiplied by a factor, so that device caches have the hit rate of the
        option `--hit-rate`. Return this factor.
        """
        g = self.geometry
        shape = SHAPES["qwen3-8b"]._replace(q_heads=g.q_heads, kv_heads=g.kv_heads)
        weights, room = weights_of(shape, g), 16 * UPDATE
        layers = token.indexed(g, self.index, tokens, shape.layers, room, self.batch)
        plan = self.works["token"] = token.Plan(shape, g, weights, layers, batch=self.batch)
        plan.turn(token.WARM)
        return token.sharpen_for(weights, plan, self.hit_rate)

    def round(self, places: list[str]) -> dict[str, Any]:
        """Measure one round, and return the times in µs.

        `places` contains values of the option `--times`, which say what to measure.
        """
        return {place: self._round(place) for place in places}

    def _round(self, place: str) -> Any:
        if place == "append":
            return append.prompt(self.geometry, self.index, self.tokens, "device", 5)
        if place == "update":
            return append.delays(*append.steps(self.works["update"], UPDATE))["updated"]
        if place == "token":
            self.works["token"].turn(token.WARM)
            return quartiles([1e3 * ms for ms in self.works["token"].turn(64)["device_ms"]])
        work = self.works["host" if place == "cached" else place]
        if place != "cached":
            return self.timed(work.run, len(work), work.ask)
        work.fill()
        return self.timed(work.run, len(work), partial(work.ask, hit_rate=self.hit_rate))


class Results:
    """Computes SHA-256 digests of the results that one checkout computes from seeded random data.

    The public method runs the command `digests`, and returns the answer.
    """

    def digests(self, spec: str, backend: str) -> dict[str, Any]:
        """Return the digest of every result of an index, and the errors that were raised.

        Args:
            spec: Name and options of the index. Options have the names of the newest version of
                kvindex, even if the checkout is older and uses other names.
            backend: "torch" or "cpu" on the CPU, "cuda" on a GPU.
        """
        found: dict[str, dict[str, str]] = {"digests": {}, "errors": {}}
        own, cuda, plain = spec_of_tree(spec), backend == "cuda", "+" not in spec
        long = plain and spec.startswith("pariskv")
        sizes: dict[str, Any] = dict(q_heads=8, kv_heads=2, head_dim=128 if cuda else 64)
        shapes = {"heads": sizes}
        if plain:  # also latent attention, on a GPU with the sizes that the kernels support
            small = dict(q_heads=4, kv_heads=1, head_dim=72, value_dim=64, value_in_key=True)
            shapes["latents"] = dict(workload.LATENT, q_heads=16) if cuda else small
        for shape, sizes in shapes.items():
            rope: Any = 1e4 ** -(torch.arange(0, sizes["head_dim"], 2) / sizes["head_dim"])
            options: dict[str, Any] = dict(dtype=torch.bfloat16 if cuda else torch.float32)
            options |= dict(device="cuda" if cuda else "cpu")
            g = Geometry.of(**sizes, rope=rope.to(options["device"]), **options)
            create = partial(kvindex.create, own, **g.options(), backend=backend)
            runs = {"index": partial(run_index, create, CHUNKS[long and shape == "heads"])}
            for name in LAYERS if plain else ["often"]:
                runs[f"layer_{name}"] = partial(run_layer, create, **LAYERS[name])
            for name, run in runs.items():
                try:
                    for part, tensor in run():
                        found["digests"][f"{shape}.{name}.{part}"] = digest(tensor)
                except Exception as error:  # other checkouts must raise the same error
                    traceback.print_exc()
                    found["errors"][f"{shape}.{name}"] = f"{type(error).__name__}: {error}"
        return found


def tokens_of(g: Geometry, count: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return random queries `[2, H, N, D]`, keys and values `[2, G, N, …]`, and a mask of padding.

    The mask is bool `[2, N]`, False for the padding at the start of the second sequence.
    """
    keys, values = next(workload.tokens_of(g, 0, 2, count))
    queries = workload.queries_of(g, 2, count).transpose(1, 2).contiguous()
    valid = torch.ones(2, count, dtype=torch.bool, device=g.device)
    valid[1, :PADDED] = False
    return queries, keys, values.contiguous(), valid


def run_index(
    create: Callable[[], KVIndex], chunks: tuple[int, int]
) -> Iterator[tuple[str, Tensor]]:
    """Append two chunks of tokens to an index, and search in it. Yield the results.

    Each result is a tensor with a name.
    """
    index = create()
    g, first, total = index.geometry, chunks[0], sum(chunks)
    queries, keys, values, valid = tokens_of(g, total)
    positions = torch.arange(total, device=g.device)
    yield from named("encode", index.encode(keys[:, :, :first]))
    parts = {"first": slice(0, first), "second": slice(first, total)}
    for name, some in parts.items():
        index.observe_tokens(positions[some] * 7 % 50, first=some.start)
        seen = queries[:, :, some].masked_fill(~valid[:, None, some, None], 0)
        index.observe_queries(seen, positions[some])
        index.append(keys[:, :, some], values[:, :, some], valid=valid[:, some])
        if name == "first":
            index.end_prompt()
        index.mark_boundary()
        for number in (0, 1):
            hits = index.search(queries[:, :, some.stop - 1 - number], k=FOUND)
            yield from named(f"{name}.hits{number}", hits)
        yield from named(f"{name}.rows", index.fetch(hits))
    attends = capability(index, Attends)
    if attends is not None:
        resident = ResidentRows(g, 2, 8)
        resident.add(keys[:, :, -8:], values[:, :, -8:], None)
        yield from named("attend", attends.attend(queries[:, :, -1], resident, k=FOUND))
        yield from named("attend_hits", attends.attend_hits(queries[:, :, -2], hits, resident))
    index.truncate(total - 50)
    yield from named("truncated", index.search(queries[:, :, -3], k=FOUND))


def run_layer(
    create: Callable[[], KVIndex], *, prompt: int, **options: Any
) -> Iterator[tuple[str, Tensor]]:
    """Let an attention layer read a prompt in two chunks and run decode steps. Yield the outputs.

    Each output is a tensor with a name.
    """
    index = create()
    layer = AttentionLayer(index, k=FOUND, local_window=32, dense_below=0, **options)
    queries, keys, values, valid = tokens_of(index.geometry, prompt + DECODED)
    ends = [prompt // 2, *range(prompt, prompt + DECODED + 1)]
    outputs = []
    for start, end in zip([0, *ends[:-1]], ends, strict=True):
        some = (part[:, :, start:end] for part in (queries, keys, values))
        outputs.append(layer.step(*some, valid=valid[:, start:end]))
    yield "prompt", torch.cat(outputs[:2], dim=2).masked_fill(~valid[:, None, :prompt, None], 0)
    yield "steps", torch.cat(outputs[2:], dim=2)
    if capability(index, ObservesQueries) is None:
        yield "again", layer.attend(queries[:, :, -1:])


def named(name: str, found: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield all tensors of a result with their names.

    `found` is a tensor, a mapping or a dataclass. Any other value has no tensors.
    """
    if isinstance(found, Tensor):
        yield name, found
    elif isinstance(found, Mapping):
        for part in sorted(found):
            yield from named(f"{name}.{part}", found[part])
    elif is_dataclass(found):
        yield from named(name, vars(found))


def digest(tensor: Tensor) -> str:
    """Return the SHA-256 of a tensor's dtype, shape and bytes."""
    whole = tensor.detach().cpu().contiguous()
    made = hashlib.sha256(f"{whole.dtype} {list(whole.shape)} ".encode())
    made.update(whole.flatten().view(torch.uint8).numpy().tobytes())
    return made.hexdigest()


def all_specs() -> list[str]:
    """Return the specs (names and options) of all indexes whose results are compared.

    These are all indexes and all their presets, without a wrapper and with each of `WRAPPERS`.
    `OTHER_SPECS` are added to these. The result contains the names that options have today, even
    if this process runs an older checkout, in which the options had other names.
    """
    plain = []
    for name in kvindex.names():
        presets = [f"{name}:preset={preset}" for preset in kvindex.get(name).presets]
        plain += [name, *(spec_of_tree(spec, back=True) for spec in presets)]
    around = [wrapper for wrapper in WRAPPERS if wrapper in wrapper_options()]
    wrapped = [f"{spec}+{wrapper}" for spec in plain for wrapper in around]
    return [*plain, *OTHER_SPECS, *wrapped]


def start(options: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Run the command `start`, which prepares the worker.

    Args:
        options: Settings of the measurement of times. If the option `equal` is true, the worker
            instead computes digests of results, and ignores all other options.

    Returns:
        An object whose methods run all later commands, and the answer to the command `start`. The
        answer contains a description of the machine, and the files from which modules were
        imported.
    """
    modules = [str(Path(module.__file__ or "")) for module in (kvindex, kvindex_cuda, benchmarks)]
    if options.get("equal"):
        backends = ["torch", "cpu", *(["cuda"] if torch.cuda.is_available() else [])]
        about = {"machine": describe("cuda" if "cuda" in backends else "cpu")}
        return Results(), about | {"modules": modules, "specs": all_specs(), "backends": backends}
    options["index"] = spec_of_tree(options["index"])
    timed, heads = GraphTimer(options.pop("replays")), ("q_heads", "kv_heads")
    sizes = {name: options.pop(name) for name in heads}
    bench = Bench(timed, replace(workload.geometry("cuda"), **sizes), **options)
    return bench, {"machine": describe("cuda"), "modules": modules}


def serve(lines: Iterable[str], out: TextIO, begin: Callable[..., tuple[Any, Any]] = start) -> None:
    """Run the command in each of the `lines`, and write its result or error to `out`."""
    bench = None
    for line in lines:
        name, *given = json.loads(line)
        try:
            if name == "start":
                bench, found = begin(*given)
            elif bench is None or name not in COMMANDS:
                allowed = f"'start' as the first command, and then {', '.join(COMMANDS)}"
                raise ValueError(f"command: got {name!r}, allowed is {allowed}")
            else:
                found = getattr(bench, name)(*given)
        except (
            Exception,
            SystemExit,
        ) as error:  # report it; compare_trees.py then ends this process
            traceback.print_exc()
            found = {"error": f"{type(error).__name__}: {error}"}
        out.write(json.dumps(found) + "\n")
        out.flush()


if __name__ == "__main__":
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # other output to stdout goes to the log, and not between the answers
    with torch.no_grad():
        serve(sys.stdin, answers)
