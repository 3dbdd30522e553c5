"""Prompts for tests of block selectors, and naive versions of what selectors have in common."""

import torch

BLOCK = 128


def prompt(tokens, *, B=2, H=4, G=2, D=16, seed=0, spread=1.5):
    """Return queries `[B, H, tokens, D]`, and keys and values `[B, G, tokens, D]`.

    Vectors vary by block as well as by token, so that blocks differ in their weights.
    """
    generator = torch.Generator().manual_seed(seed)

    def vectors(heads):
        blocks = torch.randn(B, heads, -(-tokens // BLOCK), D, generator=generator)
        noise = torch.randn(B, heads, tokens, D, generator=generator)
        return spread * blocks.repeat_interleave(BLOCK, 2)[:, :, :tokens] + noise

    return vectors(H), vectors(G), vectors(G)


def whole(keys):
    """Return the keys of all whole blocks."""
    return keys[:, :, : keys.shape[2] // BLOCK * BLOCK]


def chosen_by(selector, queries, keys, *, first=0, scale=None):
    """Return the selector's choice for queries at positions from `first` on."""
    scale = queries.shape[3] ** -0.5 if scale is None else scale
    return selector.choose(queries, selector.summarize(whole(keys)), first, scale=scale)


def naive_choice(queries, keys, choose):
    """Return a choice bool `[B, H, QB, QB]` for a whole prompt, computed by loops.

    `choose(queries [t, D], keys [n, 128, D])` gets one head's block of queries and the blocks of
    keys before it, in float64, and returns the numbers of the blocks to keep.
    """
    (B, H, T, D), G = queries.shape, keys.shape[1]
    QB = -(-T // BLOCK)
    found = torch.zeros(B, H, QB, QB, dtype=torch.bool)
    for b in range(B):
        for h in range(H):
            for i in range(QB):
                some = queries[b, h, i * BLOCK : (i + 1) * BLOCK].double()
                before = keys[b, h // (H // G), : i * BLOCK].double().view(i, BLOCK, D)
                kept = {0, i, max(i - 1, 0)} | set(choose(some, before) if i else ())
                found[b, h, i, sorted(kept)] = True
    return found


def naive_top(weights, mass):
    """Return the numbers of the largest weights that sum to at least `mass` of the total."""
    order = sorted(range(len(weights)), key=lambda j: -weights[j])
    kept, total = [], 0.0
    for j in order:
        if total >= mass * float(sum(weights)):
            break
        kept.append(j)
        total += float(weights[j])
    return kept


def fraction(chosen):
    """Return the fraction of the causal blocks that are chosen."""
    allowed = torch.ones_like(chosen).tril(chosen.shape[3] - chosen.shape[2])
    return float(chosen.sum() / allowed.sum())
