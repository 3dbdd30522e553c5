"""Check a wheel in clean virtual environments: without extras, and with each extra for a CPU.

    python tools/check_dist.py dist/kvindex_torch-*.whl

Each environment gets the CPU build of torch, and is deleted after its check. The check also covers
the sdist: `python -m build` makes the wheel from the sdist, so a file that is missing in the sdist
is missing in the wheel, too.
"""

import argparse
import re
import subprocess
import sys
import tempfile
import time
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CREATE = 'kvindex.create("pariskv", q_heads=2, kv_heads=1, head_dim=16, backend={!r})'
BASE = "import kvindex, kvindex_adapters.vllm, kvindex_cuda"
"""Imports that must work in every environment, because they need no extra."""

MISSING = """
try:
    import kvindex_adapters.hf
except ImportError as error:
    assert "[hf]" in str(error), error
else:
    raise AssertionError("kvindex_adapters.hf was imported without transformers")
"""

CODE = {
    "": MISSING,
    "hf": "import kvindex_adapters.hf, kvindex_adapters.decoder",
    "cli": MISSING,
    "cpu": f"import kvindex; {CREATE.format('cpu')}",
}
"""Extra -> code that runs in its environment. "" is the environment without extras."""

COMMANDS = {"hf": (["--version"],), "cli": (["--help"], ["--version"], ["indexes"])}
"""Extra -> arguments with which the command `kvindex` must succeed. (`kvindex` needs typer, which
transformers depends on.) Without one of these extras, the command must print one line that names
them."""


def example() -> tuple[str, str]:
    """Return the code of the README's first Python example that needs no model, and its output."""
    page = (ROOT / "README.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```(\w*)\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    at = next(
        i for i, (name, code) in enumerate(blocks) if name == "python" and "model" not in code
    )
    return blocks[at][1], blocks[at + 1][1]


def run(*command: str | Path, folder: Path, status: int = 0) -> str:
    """Run a command in a folder, and return its output.

    End this program with an error message if the exit status of the command is not `status`.
    """
    done = subprocess.run(
        command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    if done.returncode != status:
        sys.exit(f"{' '.join(map(str, command))}: status {done.returncode}\n{done.stdout}")
    return done.stdout


def check(wheel: Path, extra: str, install: list[str], folder: Path) -> None:
    """Install the wheel with an extra into a new environment, and test imports and commands."""
    venv.create(folder / "venv", with_pip=True)
    python, command = folder / "venv/bin/python", folder / "venv/bin/kvindex"
    pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *install]
    run(*pip, f"{wheel}[{extra}]" if extra else str(wheel), folder=folder)
    run(python, "-m", "pip", "check", folder=folder)
    run(python, "-c", f"{BASE}\n{CODE[extra]}", folder=folder)
    code, output = example()
    printed = run(python, "-c", code, folder=folder)
    if printed != output:
        sys.exit(f"README.md: got {printed!r}, expected {output!r}")
    for arguments in COMMANDS.get(extra, ()):
        run(command, *arguments, folder=folder)
    if extra not in COMMANDS:
        said = run(command, "--help", folder=folder, status=2)
        if "[hf,cli]" not in said or "Traceback" in said:
            sys.exit(f"kvindex --help without typer: got {said!r}")


def main() -> None:
    """Check the wheel with each set of extras in a new environment.

    Print how long each check took.
    """
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("wheel", type=Path)
    parser.add_argument("--extras", nargs="*", default=list(CODE), choices=list(CODE))
    parser.add_argument(
        "--torch-index",
        default="https://download.pytorch.org/whl/cpu",
        help="URL of a package index that has the CPU build of torch",
    )
    given = parser.parse_args()
    install = ["--constraint", str(ROOT / "constraints.txt"), "--extra-index-url"]
    for extra in given.extras:
        began = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            check(given.wheel.resolve(), extra, [*install, given.torch_index], Path(folder))
        print(f"{extra or 'no extras'}: passed in {time.monotonic() - began:.0f} s", flush=True)


if __name__ == "__main__":
    main()
