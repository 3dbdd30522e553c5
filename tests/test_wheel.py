"""A wheel built from the tree, installed elsewhere, imports and searches from `/`."""

import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import kvindex

ROOT = Path(__file__).parent.parent
SEARCH = """
import kvindex, kvindex_adapters, torch
index = kvindex.create("pariskv", q_heads=4, kv_heads=2, head_dim=16)
index.append(torch.randn(1, 2, 50, 16), torch.randn(1, 2, 50, 16))
assert index.search(torch.randn(1, 4, 16), k=5).ids.shape == (1, 2, 5)
print(kvindex.__file__, kvindex_adapters.__file__, kvindex.names())
"""


def pip(*arguments):
    command = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", *arguments]
    subprocess.run(command, check=True)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    # a copy: the build leaves nothing behind in the tree
    unwanted = shutil.ignore_patterns(".*", "build", "*.egg-info", "__pycache__")
    shutil.copytree(ROOT, source, ignore=unwanted)
    pip("wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(folder), str(source))
    return next(folder.glob("kvindex_torch-*.whl"))


def test_the_wheel_holds_the_packages_alone(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    packages = {name.split("/")[0] for name in names if ".dist-info" not in name}
    assert packages == {"kvindex", "kvindex_adapters", "kvindex_cuda"}
    assert {f"{package}/py.typed" for package in packages} <= set(names)
    kernels = {str(path.relative_to(ROOT)) for path in (ROOT / "kvindex_cuda").rglob("*.cu*")}
    assert len(kernels) > 20
    assert kernels <= set(names)
    page = {f"kvindex_adapters/evaluate/compare/page/report.{end}" for end in ("html", "css", "js")}
    assert page <= set(names)
    assert any(name.endswith("LICENSE") for name in names)


def test_the_description_has_no_links_that_lead_nowhere(wheel):
    archive = zipfile.ZipFile(wheel)
    (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
    metadata = archive.read(name).decode()
    assert f"\nVersion: {kvindex.__version__}\n" in metadata
    assert "\nLicense-Expression: Apache-2.0\n" in metadata
    assert "# kvindex" in metadata
    assert re.findall(r"\]\((?!https:|#)[^)]*\)", metadata) == []


@pytest.mark.slow
def test_it_searches_from_elsewhere(wheel, tmp_path):
    target = tmp_path / "installed"
    pip("install", "--no-deps", "--target", str(target), str(wheel))
    done = subprocess.run(
        [sys.executable, "-c", SEARCH],
        cwd="/",
        env={"PYTHONPATH": str(target)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert str(target / "kvindex") in done.stdout
    assert str(target / "kvindex_adapters") in done.stdout
