"""Measure the quality of indexes on a real model: recall, coverage of attention weight, KL.

There are nine commands:

- `recall`: recall of the presets of the index `pariskv` (the fraction of each query head's best
  tokens that are found), the attention weight of the found tokens, and the bytes per key. It is
  measured for several values of the option `beta`, the fraction of keys that become candidates.
- `kl`: KL divergence of the model's output from that with full attention, compared with the KL
  divergence of an exact search that retrieves the same number of tokens.
- `fidelity`: KL divergence from full attention, fraction of equal predictions, and recall. The
  model reads a fixed text token by token.
- `rows`: error of the attention output, and KL divergence, if keys and values are compressed by a
  row codec.
- `scales`: error of the attention output if keys have 2 or 4 bits per number. A group of numbers
  that share a scale belongs to one token or to one channel.
- `lists`: loss of quality if all heads of a layer attend to the same retrieved tokens.
- `budget`: error of the attention output if searches choose the number of tokens by their expected
  error (`k="auto"`).
- `missed`: predictions of that error which also use the coarse scores of keys that are no
  candidates.
- `field`: comparison of all indexes on the same keys and queries.

    python -m benchmarks.quality recall --text FILE… [--tokens N …] [--presets SPEC …] [--beta β …]
    python -m benchmarks.quality kl --text FILE… [--tokens N …] [--steps T] [--index SPEC …]
    python -m benchmarks.quality fidelity [--index SPEC …]
    python -m benchmarks.quality rows --text FILE… [--tokens N] [--steps T]
    python -m benchmarks.quality scales --text FILE… [--tokens N]
    python -m benchmarks.quality lists --text FILE… [--tokens N] [--steps T]
    python -m benchmarks.quality budget --text FILE… [--tokens N …] [--steps T] [--error E …]
    python -m benchmarks.quality missed --text FILE… [--tokens N …] [--steps T] [--seeds N]
    python -m benchmarks.quality field --text FILE… [--tokens N] [--index SPEC …] [--rows K …]

All commands take `--json OUT` and `--model … --gguf-file … --lora … --device …`. The default model
is SmolLM2-135M-Instruct. Each command has more options: `python -m benchmarks.quality recall
--help`.
"""

from __future__ import annotations

import argparse

import torch

from benchmarks.common.reading import add_model
from benchmarks.comparing import budget, fidelity, field, kl, lists, missed, recall, rows, scales
from kvindex_adapters.cli.common import check_search, check_size

COMMANDS = {
    **{"recall": recall, "kl": kl, "fidelity": fidelity},
    **{"rows": rows, "scales": scales, "lists": lists, "budget": budget, "missed": missed},
    "field": field,
}


def refuse(given: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    """Exit with an error message if an index cannot be created, or if `--steps` is too small.

    This check runs before the model is loaded, because loading takes long.

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
    """Parse the command line, and run the subcommand that it names."""
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
