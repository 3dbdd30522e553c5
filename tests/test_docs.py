"""The pages: README is short and true, links lead somewhere, files that are named exist."""

import ast
import contextlib
import dataclasses
import io
import re
import subprocess
from pathlib import Path

import pytest
import torch

import kvindex

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")),
    *sorted((ROOT / "benchmarks").rglob("*.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
]
WORDS, FIGURES = 700, 28
"""README's limits; figures in code are not counted, those in what it prints are."""

FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def visible(page):
    """What a reader sees: no comments, no targets of links."""
    page = re.sub(r"<!--.*?-->", "", page, flags=re.DOTALL)
    return re.sub(r"\]\([^)]*\)", "]", page)


def words(page):
    return [word for word in visible(page).split() if re.search(r"\w", word)]


def figures(page):
    """Numbers that are no part of a name."""
    shown = FENCE.sub(lambda part: part[2] if part[1] == "text" else "", visible(page))
    shown = re.sub(r"`[^`]*`", "", shown)
    return re.findall(r"(?<![\w.+-])\d[\d,.]*", shown)


def examples(page):
    """Python's blocks that need no model, each with the output that follows it, or None."""
    blocks = FENCE.findall(page)
    for (language, code), (after, output) in zip(blocks, [*blocks[1:], ("", "")], strict=True):
        if language == "python" and "model" not in code:
            yield code, output if after == "text" else None


def printed(code):
    """What a block prints."""
    said = io.StringIO()
    torch.manual_seed(0)
    with contextlib.redirect_stdout(said):
        exec(code, {"__name__": "example"})
    return said.getvalue()


def test_readme_is_short():
    assert len(words(README)) <= WORDS
    assert len(figures(README)) <= FIGURES


def test_what_runs_on_a_gpu_is_short():
    assert len(words((ROOT / "docs/cuda.md").read_text())) <= 1500


def test_words_and_figures_are_counted():
    page = "<!-- 1 comment -->\n[two words](link/3.md), 4.5 of SmolLM2-135M.\n"
    assert words(page) == ["[two", "words],", "4.5", "of", "SmolLM2-135M."]
    assert figures(page + "```python\n6\n```\n```text\n7\n```\n") == ["4.5", "7"]


def test_readmes_examples_print_what_it_shows():
    found = list(examples(README))
    assert any(output for _, output in found)
    for code, output in found:
        assert output in (None, printed(code))


def test_the_page_of_sequences_runs_as_written():
    ((code, _),) = examples((ROOT / "docs/sequences.md").read_text())
    assert printed(code)


def test_every_decision_is_listed():
    page = (ROOT / "docs/README.md").read_text()
    kept = {path.name for path in (ROOT / "docs/decisions").glob("*.md")}
    assert {*re.findall(r"\(decisions/([^)]+)\)", page)} == kept


@pytest.mark.model
@pytest.mark.slow
def test_readmes_report_is_what_the_model_prints():
    from kvindex_adapters.evaluate.tasks import hide
    from kvindex_adapters.evaluate.texts import python_reference
    from kvindex_adapters.hf.model.load_model import load, smollm2

    folder, file = smollm2()
    model, tokenizer = load(folder, gguf_file=file)
    needle = hide(tokenizer, python_reference(), tokens=2500, seed=0)
    code, output = FENCE.findall(README)[1][1], FENCE.findall(README)[2][1]
    given = {"model": model, "inputs": {"input_ids": torch.as_tensor(needle.ids).reshape(1, -1)}}
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        exec(code, given)
    assert said.getvalue() == output
    assert needle.found(tokenizer.decode(given["out"][0, len(needle.ids) :]))


def slug(heading):
    """The anchor of a heading, as GitHub and the site make it."""
    text = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).replace("`", "").strip().lower()
    return re.sub(r"[^\w\- ]", "", text).replace(" ", "-")


def anchors(page):
    return {slug(title) for title in re.findall(r"^#+ (.*)$", FENCE.sub("", page), re.MULTILINE)}


def broken(path, page):
    """Relative links of a page that lead nowhere."""
    for target in re.findall(r"\]\(([^)\s]+)\)", re.sub(r"`[^`\n]*`", "", FENCE.sub("", page))):
        place, _, anchor = target.partition("#")
        there = (path.parent / place).resolve() if place else path
        if re.match(r"\w+:", target) or (there.exists() and not anchor):
            continue
        text = page if not place else there.read_text() if there.is_file() else ""
        if anchor not in anchors(text):
            yield target


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(path):
    assert list(broken(path, path.read_text())) == []


def test_a_link_to_nowhere_is_found():
    page = "# A title: `x`\n[a](#a-title-x) [b](nowhere.md) [c](README.md#no) [d](https://e.f)"
    assert list(broken(ROOT / "page.md", page)) == ["nowhere.md", "README.md#no"]


def exported(path):
    """Where the names that a package's `__init__.py` imports from this repository come from."""
    for node in ast.parse((ROOT / path).read_text()).body:
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("kvindex"):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def test_the_api_has_every_public_door():
    pages = [path.read_text() for path in (ROOT / "docs/api").glob("*.md")]
    named = {name for page in pages for name in re.findall(r"^::: (\S+)$", page, re.MULTILINE)}
    doors = {
        *exported("kvindex/__init__.py"),
        *exported("adapters/kvindex_adapters/hf/__init__.py"),
        *exported("adapters/kvindex_adapters/decoder/__init__.py"),
    }
    doors |= {f"kvindex.ops.{name}" for name in kvindex.ops.__all__} | {"kvindex.testing"}
    shown = {f"kvindex.{name}" for name in kvindex.__all__} & named
    missing = doors - named - {door for door in doors if door.rpartition(".")[0] in named}
    assert {door for door in missing if f"kvindex.{door.split('.')[-1]}" not in shown} == set()


def test_the_site_is_built_so_that_a_dead_link_fails():
    """mkdocs counts warnings, which make it fail, where it says them."""
    build = re.search(r"mkdocs build(.*)", (ROOT / "Makefile").read_text())[1].split()
    assert build == ["--strict"]


FILE = re.compile(r"`([\w./-]+\.(?:py|cuh?|h|json|toml|txt|yml|md)|[\w./-]+/)(?:: [^`]*)?`")
ELSEWHERE = {"decode_step_five.json", "site/"}
"""Of an earlier commit; made by `make docs`."""

TREE = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True).stdout.split()


def missing(page):
    """Files and folders named in backticks that are none of this repository, by any end."""
    named = {name for name in FILE.findall(FENCE.sub("", page))} - ELSEWHERE
    return sorted(
        name
        for name in named
        if not any(f"/{path}".endswith(f"/{name}") or f"/{name}" in f"/{path}" for path in TREE)
    )


@pytest.mark.skipif(not TREE, reason="no checkout of git")
@pytest.mark.parametrize(
    "path",  # of changes past, and of files that a reader makes
    [path for path in PAGES if path.name not in ("CHANGELOG.md", "adding-an-index.md")],
    ids=lambda path: str(path.relative_to(ROOT)),
)
def test_files_that_are_named_exist(path):
    assert missing(path.read_text()) == []


@pytest.mark.skipif(not TREE, reason="no checkout of git")
def test_a_file_that_left_is_found():
    page = "`kvindex/layer.py`, `ops/fetch.py: gather_rows`, `layer/`, `nowhere/`, `ops/nothing.py`"
    assert missing(page) == ["kvindex/layer.py", "nowhere/", "ops/nothing.py"]


def options(page):
    """Names in the first column of a table of options."""
    table = re.search(r"^\| option \|.*\n\|[-| ]+\|\n((?:\|.*\n)+)", page, re.MULTILINE)
    lines = table[1].splitlines() if table else []
    return {name for line in lines for name in re.findall(r"`(\w+)`", line.split("|")[1])}


@pytest.mark.parametrize("name", kvindex.names())
def test_options_are_those_of_the_index(name):
    pages = [name.replace("-", "_")]
    if name.startswith("faiss"):  # these share a page, and lists share one more
        pages += ["faiss_flat", *(["faiss_ivf"] if "ivf" in name else [])]
    texts = [(ROOT / f"docs/indexes/{page}.md").read_text() for page in pages]
    fields = {field.name for field in dataclasses.fields(kvindex.get(name).Config)}
    assert options(texts[0]) <= fields
    assert fields <= set().union(*map(options, texts))
