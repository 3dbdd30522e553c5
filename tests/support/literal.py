"""A slow, literal implementation of the paper in Python's numbers, to compare operations with.

It uses lists, dictionaries and sorting, and nothing of `kvindex`.
"""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np

TIERS = ("0.05", "0.15", "0.30", "0.50", "0.75", "1")
CENTROIDS = [[1.0 if i >> j & 1 else -1.0 for j in range(8)] for i in range(256)]


def dot(x, y):
    return sum(a * b for a, b in zip(x, y, strict=True))


def norm(x):
    return math.sqrt(dot(x, x))


def parts(vector):
    """Return contiguous subspaces of 8 coordinates."""
    return [vector[start : start + 8] for start in range(0, len(vector), 8)]


def ceil_of(*factors):
    """Return the ceiling of a product of decimals, as they are written."""
    product = Fraction(1)
    for factor in factors:
        product *= Fraction(str(factor))
    return math.ceil(product)


def bfloat16(x):
    """Round to bfloat16, ties to even."""
    bits = int(np.float32(x).view(np.uint32))
    bits = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16 << 16
    return float(np.uint32(bits).view(np.float32))


def centroid_id(part):
    """Equation (6): the centroid of the largest inner product; at a zero the bit is 1."""
    products = [dot(part, c) for c in CENTROIDS]
    best = max(products)
    return max(i for i in range(256) if products[i] == best)


def sign_byte(part):
    """Return the signs of 8 coordinates, least significant bit first."""
    return sum(1 << j for j in range(8) if part[j] >= 0)


def encode_block(block, key_norm, levels):
    """Encode coordinates that share a weight: (level indices, weight)."""
    r = norm(block)
    u = [x / r if r else 0.0 for x in block]
    index = [min(range(len(levels)), key=lambda i: (abs(abs(x) - levels[i]), i)) for x in u]
    v = decode_part([x >= 0 for x in u], index, levels)
    return index, key_norm * r / dot(v, u) if r else 0.0  # (7) and (9)


def encode_part(part, key_norm, levels):
    """Encode one subspace: (centroid id, level indices, weight)."""
    return sign_byte(part), *encode_block(part, key_norm, levels)


def log_code(weight, bits):
    """Encode a weight: 32 octaves, with the middle code for 1."""
    if weight == 0:
        return 0
    code = round(math.log2(weight) * 2**bits / 32) + 2 ** (bits - 1)
    return min(max(code, 1), 2**bits - 1)


def log_weight(code, bits):
    return 0.0 if code == 0 else 2.0 ** ((code - 2 ** (bits - 1)) * 32 / 2**bits)


def decode_part(bits, index, levels):
    return [levels[i] if bit else -levels[i] for bit, i in zip(bits, index, strict=True)]


def tier_points(query_part, ids, limits):
    """Return the points of each centroid in one subspace for keys with these centroid ids."""
    held = {c: 0 for c in range(256)}
    for c in ids:
        held[c] += 1
    similarity = [dot(query_part, c) for c in CENTROIDS]
    order = sorted(range(256), key=lambda c: (-similarity[c], c))
    points, better = {}, 0
    for c in order:
        points[c] = sum(better < limit for limit in limits)
        better += held[c]
    return points


def dot_tables(query, largest):
    """Return the products of each subspace of the rounded query with all sign patterns."""
    peak = max(abs(x) for x in query)
    integers = [round(x * (largest / peak)) if peak else 0 for x in query]
    return [[int(dot(part, c)) for c in CENTROIDS] for part in parts(integers)]


def sums(tables, ids, factors=None):
    """Sum the entries of every key, times its factors (one, or one per subspace)."""
    if factors is None:
        factors = [[1]] * len(ids)
    total = []
    for key, factor in zip(ids, factors, strict=True):
        each = factor * len(key) if len(factor) == 1 else factor
        total.append(sum(tables[b][c] * each[b] for b, c in enumerate(key)))
    return total


def votes(query, ids, limits):
    """Return the points of every key: `ids[i][b]` is key i's centroid in subspace b."""
    tables = [
        tier_points(part, [key[b] for key in ids], limits) for b, part in enumerate(parts(query))
    ]
    return sums(tables, ids)


def best(scores, count):
    """Return the positions of the `count` best, with the lower position first among equal ones."""
    return sorted(range(len(scores)), key=lambda i: (-scores[i], i))[:count]


def schedule(n):
    """Return (β, ρ) as published."""
    if n < 5_000:
        return 0.5, 0.5
    if n < 10_000:
        return 0.25, 0.30
    return (0.20, 0.25) if n < 30_000 else (0.10, 0.20)


def search(keys, query, rotation, levels, k, beta=None, rho=None):
    """Return [(id, estimate)] of the `k` best keys for one query, best first (coarse stage,
    rerank)."""
    n = len(keys)
    scheduled = schedule(n)
    beta = scheduled[0] if beta is None else beta
    rho = scheduled[1] if rho is None else rho
    codes = []
    for key in keys:
        size = norm(key)
        unit = [x / size if size else 0.0 for x in key]
        rotated = [dot(row, unit) for row in rotation]
        codes.append([encode_part(part, size, levels) for part in parts(rotated)])
    size = norm(query)
    turned = [dot(row, [x / size if size else 0.0 for x in query]) for row in rotation]
    limits = [ceil_of(n, rho, tier) for tier in TIERS]
    points = votes(turned, [[c for c, _, _ in code] for code in codes], limits)
    candidates = best(points, min(max(ceil_of(beta, n), k), n))
    estimates = []
    for i in sorted(candidates):
        total = 0.0
        for part, (c, index, weight) in zip(parts(turned), codes[i], strict=True):
            v = decode_part([c >> j & 1 for j in range(8)], index, levels)
            total += bfloat16(weight) * dot(v, part)
        estimates.append((i, size * total))
    return sorted(estimates, key=lambda pair: (-pair[1], pair[0]))[:k]
