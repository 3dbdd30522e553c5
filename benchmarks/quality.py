"""Measure the quality of indexes on a real model: recall, coverage of attention weight, KL.

    python -m benchmarks.quality recall --text FILE… [--tokens N …] [--presets SPEC …] [--beta β …]
    python -m benchmarks.quality kl --text FILE… [--tokens N …] [--steps T] [--index SPEC …]
    python -m benchmarks.quality fidelity [--index SPEC …]
    python -m benchmarks.quality rows --text FILE… [--tokens N] [--steps T]
    python -m benchmarks.quality scales --text FILE… [--tokens N]
    python -m benchmarks.quality lists --text FILE… [--tokens N] [--steps T]
    python -m benchmarks.quality field --text FILE… [--tokens N] [--index SPEC …] [--rows K …]

- `recall`: fraction of each query head's best tokens that presets of pariskv find, their attention
  weight, and the bytes per key, for several fractions of candidates.
- `kl`: KL divergence from full attention, compared with an exact search for as many tokens.
- `fidelity`: KL divergence, fraction of equal predictions, and recall on a fixed text, token by
  token.
- `rows`: effect of compressed keys and values (row codecs) on the attention output and on KL
  divergence.
- `scales`: effect of keys with few bits on the attention output, with one scale for numbers of a
  token or of a channel.
- `lists`: loss of quality if all heads of a layer attend to the same retrieved tokens.
- `field`: comparison of all indexes on the same keys and queries.

All commands take `--json OUT` and `--model … --gguf-file … --lora … --device …`. The default model
is SmolLM2-135M-Instruct. Each command has more options: `python -m benchmarks.quality recall
--help`.
"""

from __future__ import annotations

import argparse

import torch

from benchmarks.common.reading import add_model
from benchmarks.comparing import fidelity, field, kl, lists, recall, rows, scales
from kvindex_adapters.cli.common import check_search, check_size

COMMANDS = {
    **{"recall": recall, "kl": kl, "fidelity": fidelity},
    **{"rows": rows, "scales": scales, "lists": lists, "field": field},
}


def refuse(given: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    """Exit with an error message if an index cannot be created, or if `--steps` is too small.

    The check runs before the model is loaded, because loading takes long.

    Args:
        given: The parsed command line. It has `index` or `presets` if the command has this option.
        parser: The parser, which prints the error message.
    """
    arguments = vars(given)
    specs = [*(arguments.get("index") or ())]
    if "presets" in arguments:
        specs += recall.expand(given.presets, given.beta, given.rho)
    try:
        for spec in specs:
            check_search(spec.replace("{k}", "100"), arguments.get("k", 100), given.device)
        if given.run is kl.run:
            check_size("steps", given.steps, kl.BLOCK)
    except (ValueError, ImportError) as error:
        parser.error(str(error))


def main(arguments: list[str] | None = None) -> None:
    """Run one of the commands."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    commands = parser.add_subparsers(required=True, metavar="|".join(COMMANDS))
    for name, module in COMMANDS.items():
        doc = module.__doc__ or ""
        command = commands.add_parser(name, help=doc.splitlines()[0], description=doc)
        add_model(command)
        module.add(command)
        command.set_defaults(run=module.run)
    given = parser.parse_args(arguments)
    refuse(given, parser)
    with torch.no_grad():
        given.run(given)


if __name__ == "__main__":
    main()
