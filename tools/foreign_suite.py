"""Run the generation tests of transformers with an index in place of its KV cache.

```
PYTHONPATH=.:adapters python tools/foreign_suite.py --transformers CHECKOUT [--families NAME …]
```

CHECKOUT is a checkout of transformers' sources, whose tests import the folder `src` of the same
checkout. The tests of the class `GenerationTesterMixin` run with a replacement for `generate`. It
runs `generate` twice: on a copy of the model without an index, and inside `attach` with an index
that returns every row (the key and the value of each token). Tokens, scores and logits must agree.
The test then continues with the output of the run with the index.

The command prints which tests it leaves out, and exits with status 1 if any other test fails. It
needs the packages that transformers' tests import: pytest, parameterized, pytest-rerunfailures,
datasets.
"""

from __future__ import annotations

import argparse
import copy
import functools
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

FAMILIES = ("llama", "qwen3", "phi3", "gemma3", "olmo3")  # gemma3 and olmo3 have sliding windows
INDEXES = ("exact", "pariskv:beta=1")
REGIONS = dict(sink=1, local_window=2, update_every=2, dense_below=0)
EVERY_ROW = 500
TOLERANCE = 1e-4  # for scores and logits with and without an index

QUIET = ("-q", "--no-header", "--tb=short", "--show-capture=no", "-Wignore", "-pno:cacheprovider")
STATIC = "a static cache, which attach() replaces"
ITSELF = "the model assists itself, which attach() refuses"
MULTIMODAL = "not a decoder of text alone: images attend in both directions"
LEFT_OUT = {
    "test_generate_with_static_cache": STATIC,
    "test_generate_from_inputs_embeds_with_static_cache": STATIC,
    "test_static_cache_no_recompile_with_smaller_length": STATIC,
    "test_generate_compil": f"torch.compile with {STATIC}",
    "test_generate_with_quant_cache": "a quantized cache, which attach() replaces",
    "test_past_key_values_format": "looks at the cache of one forward, without generate",
    "test_assisted_decoding_matches_greedy_search_1_same": ITSELF,
    "test_assisted_decoding_sample": ITSELF,
    "test_eager_matches_": "compares two attention implementations; attach() is a third",
}
"""Name of a test, or its beginning -> the reason why the test cannot run with an index."""

ADAPTED = (
    "prompts are padded on the left only, as generation needs them",
    "prompts are longer than sliding windows, and weights are larger, so that a wrong row shows",
    "attention weights are not requested, because no step computes them",
    "use_cache=False becomes True, because the cache is tested",
    "caches are compared by length, because an index has no tensors of all keys and values",
)


class Suite:
    """A pytest plugin that replaces the method `generate` of transformers' models.

    The replacement runs the original `generate` twice: without an index, and with an index.
    """

    def __init__(self, index: str, k: int) -> None:
        from transformers import GenerationMixin

        from kvindex_adapters.hf.attach import attach
        from kvindex_adapters.hf.cache.cache import IndexCache

        self.attach = functools.partial(attach, index=index, k=k, **REGIONS)
        self.cache_class, self.generate = IndexCache, GenerationMixin.generate
        self.outcomes: Counter[str] = Counter()
        self.left_out: dict[tuple[str, str], list[str]] = {}
        self.calls = self.calls_before = self.searches = 0
        self.open: dict[int, tuple[ExitStack, Any]] = {}
        self.copies: dict[int, tuple[Any, Any]] = {}
        self.inside = False

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        """Select the tests of `GenerationTesterMixin`, except `LEFT_OUT`, and adapt them."""
        from tests.causal_lm_tester import CausalLMModelTest
        from tests.generation.test_utils import GenerationTesterMixin

        selected = []
        for item in items:
            if item.name not in vars(GenerationTesterMixin):
                continue
            if not issubclass(item.cls, CausalLMModelTest):
                self.leave_out(item.nodeid.rpartition("::")[0], MULTIMODAL)
            elif reason := next((LEFT_OUT[n] for n in LEFT_OUT if item.name.startswith(n)), None):
                self.leave_out(item.nodeid, reason)
            else:
                adapt(item.cls, self.cache_class)
                selected.append(item)
        items[:] = selected

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Iterator[None]:
        """Run a test of transformers with the method `generate` of all models replaced."""
        from transformers import GenerationMixin, set_seed

        from tests import test_modeling_common

        set_seed(0)
        test_modeling_common.global_rng.seed(0)
        self.calls_before = self.calls
        routed = mock.patch.object(
            GenerationMixin, "generate", lambda *a, **k: self.routed(*a, **k)
        )
        try:
            with routed:
                return (yield)
        finally:
            for model in list(self.open):
                self.close(model)
            self.copies.clear()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Count a test as passed or failed, or record why it has not tested an index."""
        if report.skipped and isinstance(report.longrepr, tuple):
            self.leave_out(report.nodeid, report.longrepr[2].replace("Skipped", "skips itself"))
        elif report.when == "call" and report.passed and self.calls == self.calls_before:
            self.leave_out(report.nodeid, "calls no generate")
        elif report.when == "call" or report.failed:
            self.outcomes[report.outcome] += 1

    def leave_out(self, node: str, reason: str) -> None:
        """Record why a test is left out. `node` is its name in pytest."""
        test, family = node.rpartition("::")[2], Path(node.partition("::")[0]).parent.name
        self.left_out.setdefault((test, reason), []).append(family)

    def routed(self, model: Any, *args: Any, **kwargs: Any) -> Any:
        """Run `generate` once with full attention and once with the index. Compare the outputs.

        Return the output of the second run, with the index.
        """
        import torch

        from kvindex_adapters.hf.model.cache_argument import CACHE, OLD, given_cache

        if self.inside:  # a nested call, for example by an assistant model
            return self.generate(model, *args, **kwargs)
        cache = past = given_cache(kwargs)
        kwargs = {name: value for name, value in kwargs.items() if name not in (CACHE, OLD)}
        kwargs["use_cache"] = True
        if isinstance(cache, self.cache_class):
            plain, past = self.copies[id(cache)]
            plain.generation_config = copy.deepcopy(model.generation_config)
        else:
            self.close(id(model))
            plain, stack = copy.deepcopy(model), ExitStack()
            cache = stack.enter_context(self.attach(model))
            self.open[id(model)] = stack, cache
        cached = {} if past is None else {CACHE: past}
        state, self.inside = torch.get_rng_state(), True
        try:
            expected = self.generate(plain, *args, **kwargs, **cached)
            torch.set_rng_state(state)
            output = self.generate(model, *args, **kwargs, **{CACHE: cache})
        finally:
            self.inside = False
        compare(output, expected)
        self.calls += 1
        self.copies[id(cache)] = plain, getattr(expected, CACHE, None)
        # If `generate` returned only a tensor, the test did not get the cache. So it cannot call
        # `generate` again to continue this text.
        if isinstance(output, torch.Tensor):
            self.close(id(model))
        return output

    def close(self, model: int) -> None:
        """Leave the context of `attach` for a model, if there is one, and count its searches."""
        if model in self.open:
            stack, cache = self.open.pop(model)
            self.searches += sum(layer.traffic.steps for layer in cache.attention_layers())
            stack.close()


def adapt(tests: Any, cache_class: type) -> None:
    """Change a class of transformers' tests so that its tests can run with an index.

    `ADAPTED` lists the changes. A class that was changed before stays as it is.
    """
    if vars(tests).get("has_attentions") is False:
        return
    tests.has_attentions = False
    tester, outputs = tests.model_tester_class, tests._check_generate_outputs
    inputs = tester.prepare_config_and_inputs_for_common

    def padded_on_the_left(self: Any) -> Any:
        self.initializer_range, self.seq_length = 0.2, 20
        if hasattr(self, "layer_types"):
            self.sliding_window = 8
        config, given = inputs(self)
        ids, pad = given["input_ids"], config.get_text_config().pad_token_id
        given["input_ids"] = ids.masked_fill(ids == pad, 1 if pad != 1 else 2)
        rows, columns = ids.new_tensor(range(len(ids))), ids.new_tensor(range(ids.shape[1]))
        given["attention_mask"] = (columns >= 3 * rows[:, None]).long()
        return config, given

    def with_a_cache(self: Any, *args: Any, **kwargs: Any) -> None:
        outputs(self, *args, **{**kwargs, "use_cache": True})

    tester.prepare_config_and_inputs_for_common = padded_on_the_left
    tests._check_generate_outputs = with_a_cache
    for name in ("_check_past_key_values_for_generate", "_check_caches_are_equal"):
        setattr(tests, name, lengths(getattr(tests, name), cache_class))


def lengths(check: Callable[..., None], cache_class: type) -> Callable[..., None]:
    """Return a test function that replaces `check`, a test function of transformers.

    `check` compares the tensors in caches of transformers. Caches with indexes do not have these
    tensors. So if an argument of the new function is a cache of the class `cache_class`, the
    function only asserts that all such caches contain the same number of tokens. Otherwise, it
    calls `check`.
    """

    def checked(self: Any, *args: Any, **kwargs: Any) -> None:
        caches = [one for one in (*args, *kwargs.values()) if isinstance(one, cache_class)]
        if not caches:
            check(self, *args, **kwargs)
        found = set().union(*(cache.lengths() for cache in caches), {kwargs.get("seq_length")})
        assert len(found - {None}) <= 1, f"caches contain {found} tokens"

    return checked


def compare(output: Any, expected: Any) -> None:
    """Raise AssertionError unless the tokens are equal, and the scores and logits are nearly
    equal."""
    import torch

    if isinstance(expected, torch.Tensor):
        assert torch.equal(output, expected), f"tokens: {output} through the index, not {expected}"
        return
    for name in ("scores", "logits"):
        pairs = zip(getattr(output, name) or (), getattr(expected, name) or (), strict=True)
        for a, b in pairs:
            torch.testing.assert_close(a, b, atol=TOLERANCE, rtol=TOLERANCE, msg=name)
    assert torch.equal(output.sequences, expected.sequences), "tokens"


def run(index: str, k: int, families: list[str]) -> bool:
    """Run the tests of some families with one index, and print a report.

    Returns True if tests passed, none failed, and the index was searched.
    """
    suite = Suite(index, k)
    files = [f"tests/models/{family}/test_modeling_{family}.py" for family in families]
    pytest.main([*QUIET, "-olog_cli=false", *files], plugins=[suite])
    for (test, reason), where in sorted(suite.left_out.items()):
        some = "" if set(where) == set(families) else f" of {', '.join(sorted(set(where)))}"
        print(f"left out: {test}{some}: {reason}")
    for line in ADAPTED:
        print(f"adapted: {line}")
    passed, failed = suite.outcomes["passed"], suite.outcomes["failed"]
    print(f"{index}, k={k}: {passed} of {passed + failed} tests passed;", end=" ")
    print(f"{suite.calls} calls of generate, {suite.searches} searches in their layers")
    return passed > 0 and failed == 0 and suite.searches > 0


def main() -> int:
    """Parse the command line, and run the tests with one index or with each of `INDEXES`."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--transformers",
        required=True,
        type=Path,
        metavar="CHECKOUT",
        help="folder with a checkout of transformers' sources",
    )
    parser.add_argument(
        "--families",
        nargs="+",
        default=FAMILIES,
        metavar="NAME",
        help="names of the model families to test",
    )
    parser.add_argument(
        "--index",
        metavar="SPEC",
        help=f"name and options of the index to test (default: {' and '.join(INDEXES)})",
    )
    parser.add_argument(
        "--k",
        type=int,
        default=EVERY_ROW,
        help="number of tokens to retrieve per KV head. If it is smaller than the number of tokens "
        "in a test, tests must fail, which shows that they notice missing tokens.",
    )
    options = parser.parse_args()
    if not (options.transformers / "tests/generation/test_utils.py").exists():
        folder = options.transformers
        parser.error(f"--transformers: got {folder}, allowed is a folder with tests/generation")
    if options.index is None:  # a process for each index, because pytest can run only once
        again = [sys.executable, __file__, *sys.argv[1:], "--index"]
        return max(subprocess.run([*again, index]).returncode for index in INDEXES)
    os.chdir(options.transformers)
    sys.path[:0] = [str(Path("src").resolve()), str(Path.cwd())]
    return 0 if run(options.index, options.k, options.families) else 1


if __name__ == "__main__":
    raise SystemExit(main())
