"""Counter-based noise: the same bits wherever and whenever they are asked for.

Law. Every random number is a function of (seed, choice, position) and either a token id or a purpose; nothing is drawn from
a stream, so nothing depends on how often, in what order or on which machine a position is judged.

    row_key     (seed, choice, position) -> 64 bits, by a full mix after each part
    noise_bits  (row key, token id)      -> 32 bits x
    gumbel      x -> g:  u = (x + 0.5) / 2^32, at most 1 - 2^-24;  E = -log1p(-u);  g = -log(E)
    uniform     (seed, choice, position, purpose) -> (0, 1), for the law `rejection`

The mix of a token has two steps. `premix` hashes the id alone, so that the rows of two keys are never shifted or permuted
copies of each other. The keyed step is Wellons' lowbias32 with one word of the key added before it and the other folded in
between its two multiplications. Only 32-bit add, multiply, xor and logical shift are used: numpy's uint32 and torch's int32
(with masked shifts) give the same bits, and a row costs ten passes.

Small u is the winning end: there E and g keep full relative resolution, where -log(-log(u)) in single precision would
give an infinite score about once in 700 rows of 49,152.
"""

from __future__ import annotations

import enum
from functools import lru_cache

import numpy as np
import numpy.typing as npt

Bits = npt.NDArray[np.uint32]
Ids = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

MASK64 = 2**64 - 1
GOLDEN = 0x9E3779B97F4A7C15

FIRST_MULTIPLIER = 0x7FEB352D
SECOND_MULTIPLIER = 0x846CA68B
"""lowbias32, https://nullprogram.com/blog/2018/07/31/ ; shifts 16, 15, 16."""

U_MAX = 1.0 - 2.0**-24
G_MAX = 33 * float(np.log(2.0))
"""No g is larger: u is at least 2^-33 and E at least u."""
G_MIN = -float(np.log(24 * np.log(2.0)))
"""No g is smaller: the clamp bounds E by 24 log 2."""


class Purpose(enum.IntEnum):
    """What a uniform is for. Under `rejection` each decision at a position has a draw of its own."""

    DRAFT = 1
    ACCEPT = 2
    CORRECTION = 3
    BONUS = 4


def mix64(x: int) -> int:
    """Stafford's variant 13, the finaliser of SplitMix64: a bijection of 64 bits."""
    x &= MASK64
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK64
    return x ^ (x >> 31)


def row_key(seed: int, choice: int, position: int) -> int:
    """64 bits for one position of one choice of one seed."""
    key = mix64(seed + GOLDEN)
    key = mix64(key + (choice + 1) * GOLDEN)
    return mix64(key + (position + 1) * GOLDEN)


def uniform(seed: int, choice: int, position: int, purpose: Purpose) -> float:
    """A double in (0, 1): 51 bits and a half, so that uniform * total stays below total after rounding, for any total."""
    bits = mix64(row_key(seed, choice, position) ^ mix64(purpose * GOLDEN))
    return ((bits >> 13) + 0.5) * 2.0**-51


def premix(ids: Ids | range) -> Bits:
    """The part of the mix that knows the token id only. [n] -> [n]; Wellons' triple32, a bijection of 32 bits."""
    x = np.asarray(ids, dtype=np.int64).astype(np.uint32) + np.uint32(GOLDEN >> 32)
    for shift, multiplier in ((17, 0xED5AD4BB), (11, 0xAC4C1B51), (15, 0x31848BAB)):
        x ^= x >> np.uint32(shift)
        x *= np.uint32(multiplier)
    return x ^ (x >> np.uint32(14))


@lru_cache(maxsize=8)
def premix_table(size: int) -> Bits:
    """`premix` of ids 0 .. size - 1, kept, read-only."""
    table = premix(range(size))
    table.setflags(write=False)
    return table


def mix_into(premixed: Bits, low: np.uint32 | Bits, high: np.uint32 | Bits, out: Bits, scratch: Bits) -> None:
    """The keyed step of the mix, without allocation. [n] each; `out` and `scratch` are overwritten."""
    np.add(premixed, low, out=out)
    np.right_shift(out, np.uint32(16), out=scratch)
    np.bitwise_xor(out, scratch, out=out)
    np.multiply(out, np.uint32(FIRST_MULTIPLIER), out=out)
    np.bitwise_xor(out, high, out=out)
    np.right_shift(out, np.uint32(15), out=scratch)
    np.bitwise_xor(out, scratch, out=out)
    np.multiply(out, np.uint32(SECOND_MULTIPLIER), out=out)
    np.right_shift(out, np.uint32(16), out=scratch)
    np.bitwise_xor(out, scratch, out=out)


def halves(key: int) -> tuple[np.uint32, np.uint32]:
    """The two words that key a row. Mixed once more, so that every bit of the key reaches the first word as well."""
    key = mix64(key)
    return np.uint32(key & 0xFFFFFFFF), np.uint32(key >> 32)


def noise_bits(key: int, ids: Ids | range) -> Bits:
    """32 bits per token of the row with this key. [n] -> [n]."""
    whole = isinstance(ids, range) and ids.start == 0 and ids.step == 1
    premixed = premix_table(len(ids)) if whole else premix(ids)
    out, scratch = np.empty_like(premixed), np.empty_like(premixed)
    mix_into(premixed, *halves(key), out, scratch)
    return out


def gumbel(bits: Bits) -> Floats:
    """Standard Gumbel noise, G_MIN to G_MAX. [n] -> [n]."""
    u = np.minimum((bits.astype(np.float64) + 0.5) * 2.0**-32, U_MAX)
    noise: Floats = -np.log(-np.log1p(-u))
    return noise
