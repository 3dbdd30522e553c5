"""Check the pages: examples run, links have targets, and files that are named exist."""

import ast
import contextlib
import dataclasses
import importlib.util
import io
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml

import kvindex
import kvindex_adapters.hf as kvhf
from kvindex_adapters.decoder import Decoder
from kvindex_adapters.hf.model import load_model
from tests.adapters.tiny import build, byte_pairs

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")),
    *sorted((ROOT / "benchmarks").rglob("*.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
]

_spec = importlib.util.spec_from_file_location("hooks", ROOT / "docs/hooks.py")
hooks = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(hooks)

FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def examples(page):
    """Return the Python blocks that need no model, each with the output that follows it, or
    None."""
    blocks = FENCE.findall(page)
    for (language, code), (after, output) in zip(blocks, [*blocks[1:], ("", "")], strict=True):
        if language == "python" and "model" not in code:
            yield code, output if after == "text" else None


def printed(code):
    """Run a block, and return what it prints."""
    said = io.StringIO()
    torch.manual_seed(0)
    with contextlib.redirect_stdout(said):
        exec(code, {"__name__": "example"})
    return said.getvalue()


def test_readmes_examples_print_what_it_shows():
    found = list(examples(README))
    assert any(output for _, output in found)
    for code, output in found:
        assert output in (None, printed(code))


def navigation():
    """Return the site's navigation, with folders replaced by their pages."""
    nav = (ROOT / "mkdocs.yml").read_text().partition("\nnav:")[2]
    return list(hooks.expanded(yaml.safe_load("nav:" + nav)["nav"]))


def paths(entries):
    for entry in entries:
        for inside in entry.values():
            yield from [inside] if isinstance(inside, str) else paths(inside)


def test_the_first_level_of_the_navigation():
    assert [name for entry in navigation() for name in entry] == [
        "Quickstart",
        "Install",
        "transformers",
        "The decoder",
        "vLLM",
        "Choose an index",
        "How it works",
        "Write your own index",
        "Results",
        "Reference",
        "For contributors",
    ]


def test_every_page_is_in_the_navigation_once():
    found = list(paths(navigation()))
    pages = [path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")]
    assert sorted([*found, "README.md"]) == sorted([*pages, *hooks.OUTSIDE])


def test_decisions_and_lab_pages_are_one_list_by_their_subjects():
    pages = navigation()[-1]["For contributors"][-1]["Decisions and lab"]
    folders = {path.split("/")[0] for path in paths(pages)}
    assert folders == {"decisions", "lab"}
    assert not any(title[:4].isdigit() for entry in pages for title in entry)


def first_script(page):
    """Return the first Python block of a page, or None."""
    return next((code for language, code in FENCE.findall(page) if language == "python"), None)


FIRST = {
    path.relative_to(ROOT).as_posix(): script
    for path in PAGES
    if (script := first_script(path.read_text()))
}
"""Page -> its first script, which must run as it is."""

NEEDS = {
    **{f"docs/indexes/faiss_{name}.md": "faiss" for name in ("flat", "hnsw", "ivf", "ivfpq")},
    "docs/adapters/ruler.md": "long_context_eval",
    "docs/adapters/vllm.md": "vllm",
    "docs/adapters/lm-eval.md": "lm_eval",
}
"""Page -> the package that its first script needs."""

GPUS = {"docs/cuda.md": pytest.mark.gpu, "docs/distributed.md": pytest.mark.skip("torchrun")}
"""Page -> the mark of a first script that needs GPUs, or a launcher."""

QUICK = {"docs/indexes/dsa.md", "docs/indexes/exact.md", "docs/indexes/quest.md"}
LONG = {
    f"docs/adapters/{name}.md"
    for name in ("batching", "chat", "compare", "several-questions", "tasks", "ruler")
}
LONG |= {"docs/README.md", "docs/adapters/decoder.md"}
LONG |= {page for page in FIRST if page.startswith("docs/indexes/")} - QUICK
"""Pages whose first script takes long, or is much like another page's."""

SCRIPTS = [
    pytest.param(
        page,
        script,
        id=page,
        marks=[GPUS[page]] if page in GPUS else [pytest.mark.slow] if page in LONG else [],
    )
    for page, script in FIRST.items()
]


def test_pages_of_indexes_adapters_and_the_readme_have_a_script():
    assert {"README.md", "docs/quickstart.md", "docs/adapters/transformers.md"} <= FIRST.keys()
    assert len(FIRST) > 40
    assert NEEDS.keys() | GPUS.keys() | LONG <= FIRST.keys()


def test_first_scripts_define_their_names(tmp_path):
    for page, script in FIRST.items():
        (tmp_path / f"{page.replace('/', '-')}.py").write_text(script)
    check = ["ruff", "check", "--isolated", "--select", "F821", "--output-format", "concise"]
    done = subprocess.run(
        [sys.executable, "-m", *check, str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout


@pytest.fixture(scope="module")
def tiny():
    """A small random model and a tokenizer, for scripts that load SmolLM2."""
    tokenizer = byte_pairs()
    sizes = dict(vocab_size=2000, max_position_embeddings=2**16, num_hidden_layers=2)
    return build("llama", **sizes, eos_token_id=None), tokenizer


@pytest.mark.parametrize(("page", "script"), SCRIPTS)
def test_first_scripts_run(page, script, tiny, tmp_path, monkeypatch):
    if page in NEEDS:
        pytest.importorskip(NEEDS[page])
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(kvhf, "load_model", lambda name: tiny, raising=False)
    monkeypatch.setattr(Decoder, "from_pretrained", lambda name: Decoder.of(*tiny))
    printed(script)


@pytest.fixture(scope="module")
def smollm2():
    """Return SmolLM2 and its tokenizer, which `kvhf.load_model("smollm2")` loads."""
    folder, file = load_model.smollm2()
    return load_model.load(folder, gguf_file=file)


@pytest.mark.model
@pytest.mark.slow
@pytest.mark.parametrize("page", ["README.md", "docs/quickstart.md"])
def test_the_first_script_prints_what_the_page_shows(page, smollm2, monkeypatch):
    monkeypatch.setattr(kvhf, "load_model", lambda name: smollm2, raising=False)
    blocks = FENCE.findall((ROOT / page).read_text())
    shown = blocks[1 + next(i for i, (language, _) in enumerate(blocks) if language == "python")]
    assert printed(FIRST[page]) == shown[1]
    assert "8056020" in shown[1]


def test_the_page_about_installation_names_the_wheel():
    page = (ROOT / "docs/install.md").read_text()
    assert set(re.findall(r"kvindex_torch-(\d[\w.]*)-py3", page)) == {kvindex.__version__}


def slug(heading):
    """Return the anchor of a heading, as GitHub and the site make it."""
    text = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).replace("`", "").strip().lower()
    return re.sub(r"[^\w\- ]", "", text).replace(" ", "-")


def anchors(page):
    page = FENCE.sub("", page)
    named = re.findall(r'<a id="([^"]+)"></a>', page)  # earlier names of headings
    return {*named, *map(slug, re.findall(r"^#+ (.*)$", page, re.MULTILINE))}


def broken(path, page):
    """Return the relative links of a page whose targets do not exist."""
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
    """Return the modules from which a package's `__init__.py` imports names of this repository."""
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
    """With `--strict`, mkdocs fails on warnings, but only if it prints them (not with
    `--quiet`)."""
    build = re.search(r"mkdocs build(.*)", (ROOT / "Makefile").read_text())[1].split()
    assert build == ["--strict"]


FILE = re.compile(r"`([\w./-]+\.(?:py|cuh?|h|json|toml|txt|yml|md)|[\w./-]+/)(?:: [^`]*)?`")
ELSEWHERE = {"decode_step_five.json", "site/", "dist/"}
"""Files that are not in the tree: one of an earlier commit, and the folders that `make docs` and
`make dist` make."""

TREE = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True).stdout.split()


def missing(page):
    """Return the files and folders named in backticks that no path of this repository ends with."""
    named = {name for name in FILE.findall(FENCE.sub("", page))} - ELSEWHERE
    return sorted(
        name
        for name in named
        if not any(f"/{path}".endswith(f"/{name}") or f"/{name}" in f"/{path}" for path in TREE)
    )


@pytest.mark.skipif(not TREE, reason="no checkout of git")
@pytest.mark.parametrize(
    "path",  # past changes, and files that readers make
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
    """Return the names in the first column of a table of options."""
    table = re.search(r"^\| option \|.*\n\|[-| ]+\|\n((?:\|.*\n)+)", page, re.MULTILINE)
    lines = table[1].splitlines() if table else []
    return {name for line in lines for name in re.findall(r"`(\w+)`", line.split("|")[1])}


@pytest.mark.parametrize("name", kvindex.names())
def test_options_are_those_of_the_index(name):
    pages = [name.replace("-", "_")]
    if name.startswith("faiss"):  # these share options, and indexes with lists share more
        pages += ["faiss_flat", *(["faiss_ivf"] if "ivf" in name else [])]
    texts = [(ROOT / f"docs/indexes/{page}.md").read_text() for page in pages]
    fields = {field.name for field in dataclasses.fields(kvindex.get(name).Config)}
    assert options(texts[0]) <= fields
    assert fields <= set().union(*map(options, texts))
