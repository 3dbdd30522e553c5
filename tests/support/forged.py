"""States and saved folders that were changed and signed again."""

import json

import torch

from kvindex.storage import saved
from kvindex.storage.safetensors import Written, read, write
from kvindex.storage.state import ABOUT, above, below, signed

MANIFEST, TENSORS = "manifest.json", "state.safetensors"


def resigned(state):
    """Return a state whose `about` describes its changed tensors, also in nested indexes."""
    for inner in ("inner", "truth", "index", "attention"):
        if part := below(inner, state):
            others = {name: t for name, t in state.items() if not name.startswith(f"{inner}.")}
            state = others | above(inner, resigned(part))
    if ABOUT not in state:
        return state
    whose = json.loads(bytes(state[ABOUT].tolist()))["whose"]
    return signed(whose, {name: part for name, part in state.items() if name != ABOUT})


def manifest_of(folder):
    """Return the manifest of a folder as JSON."""
    return json.loads((folder / MANIFEST).read_text())


def sign(folder, manifest):
    """Write a manifest with a matching digest."""
    rest = {name: part for name, part in manifest.items() if name != "digest"}
    (folder / MANIFEST).write_text(json.dumps({**rest, "digest": saved._digest(rest)}))


def describe(folder, file, written):
    """Update the manifest's entry of a file."""
    manifest = manifest_of(folder)
    manifest["files"][file] = written._asdict()
    sign(folder, manifest)


def tensors_of(folder, file=TENSORS):
    """Return the tensors of a file."""
    return read(folder / file, Written(**manifest_of(folder)["files"][file]))


def put(folder, state, file=TENSORS):
    """Replace the tensors of a file, with matching digests."""
    (folder / file).unlink()
    describe(folder, file, write(folder / file, resigned(state)))


def number(value):
    """Return a number in the format of a state."""
    return torch.tensor(value)
