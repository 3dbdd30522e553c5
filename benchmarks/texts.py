"""Write the texts that the benchmarks read: prose, code, and dialogue.

    python benchmarks/texts.py FOLDER [--dialogue] [--device cuda]

prose.txt and code.txt are what every Python carries. dialogue.txt lies in benchmarks/texts/, for
it takes a GPU to make: conversations of SmolLM2-135M-Instruct with itself, sampled from a seed.
"""

from __future__ import annotations

import argparse
import random
from pathlib import Path
from typing import Any

import torch

from kvindex_adapters.evaluate.texts import python_reference, python_source
from kvindex_adapters.models import load, smollm2

CHARACTERS = 400_000
TOPICS = (
    *("the sea", "a broken bicycle", "baking bread", "the French Revolution", "black holes"),
    *("learning the piano", "a lost dog", "growing tomatoes", "the moon landing", "dreams"),
    *("a long train journey", "how rivers form", "chess", "old photographs", "volcanoes", "tea"),
)
TURNS, WORDS = 4, (220, 60)


def dialogue(model: Any, tokenizer: Any, count: int, seed: int) -> str:
    """`count` conversations, the model speaking for both sides."""
    draw = random.Random(seed)
    torch.manual_seed(seed)
    tokenizer.padding_side, tokenizer.pad_token = "left", tokenizer.eos_token
    starts = [f"Hello! I would like to talk about {draw.choice(TOPICS)}." for _ in range(count)]
    texts = [f"<|im_start|>user\n{start}<|im_end|>\n" for start in starts]
    for turn in range(2 * TURNS - 1):
        speaker, words = ("assistant", WORDS[0]) if turn % 2 == 0 else ("user", WORDS[1])
        asked = [f"{text}<|im_start|>{speaker}\n" for text in texts]
        inputs = tokenizer(asked, return_tensors="pt", padding=True).to(model.device)
        with torch.no_grad():
            output = model.generate(
                input_ids=inputs["input_ids"],
                attention_mask=inputs["attention_mask"],
                max_new_tokens=words,
                do_sample=True,
                temperature=0.8,
            )
        said = tokenizer.batch_decode(
            output[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True
        )
        texts = [f"{a}{s.strip()}<|im_end|>\n" for a, s in zip(asked, said, strict=True)]
    plain = "\n\n".join(texts).replace("<|im_end|>", "")
    return plain.replace("<|im_start|>user\n", "User: ").replace(
        "<|im_start|>assistant\n", "Assistant: "
    )


def main() -> None:
    """Write the texts."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--dialogue", action="store_true", help="make dialogue.txt anew")
    parser.add_argument("--model")
    parser.add_argument("--device", default="cpu")
    given = parser.parse_args()
    given.folder.mkdir(parents=True, exist_ok=True)
    prose = python_reference()
    random.Random(0).shuffle(prose)
    (given.folder / "prose.txt").write_text("\n\n".join(prose)[:CHARACTERS])
    (given.folder / "code.txt").write_text(python_source()[:CHARACTERS])
    if given.dialogue:
        folder, file = (given.model, None) if given.model else smollm2()
        model, tokenizer = load(folder, gguf_file=file, device=given.device)
        (given.folder / "dialogue.txt").write_text(dialogue(model, tokenizer, 96, 0))


if __name__ == "__main__":
    main()
