"""Noise: the same bits everywhere, and bits that look like chance."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from specwire.law.noise import (
    G_MAX,
    G_MIN,
    Purpose,
    gumbel,
    halves,
    noise_bits,
    premix,
    premix_table,
    row_key,
    uniform,
)
from specwire.lm.sampling_torch import bits_on_device
from tests.law.enumeration import chi_square_z

KEYS = {
    (0, 0, 0): 0x238275BC38FCBE91,
    (7, 0, 0): 0x9C01479161BC5D78,
    (7, 1, 0): 0x2B00DED9D5A6F2EC,
    (7, 0, 1): 0x68BFFCD4B372EF48,
    (2**64 - 1, 2**32 - 1, 2**32 - 1): 0x5700BC0052790741,
}
GOLDEN_IDS = [0, 1, 2, 3, 255, 49151]
GOLDEN_BITS = [0xF0A9DE63, 0x9B1C2B26, 0x4D8A6EFD, 0x32E676F1, 0x2CF772B4, 0x7DF78866]
"""Row of seed 7, choice 0, position 3."""


@pytest.mark.parametrize("where", KEYS)
def test_row_key_golden(where):
    """Keys never change: a seed given to a client repeats its text in every later version."""
    assert row_key(*where) == KEYS[where]


def test_noise_bits_golden():
    """Bits never change, for a few tokens and over a whole row."""
    row = noise_bits(row_key(7, 0, 3), range(49152))

    assert row[GOLDEN_IDS].tolist() == GOLDEN_BITS
    assert int(np.bitwise_xor.reduce(row)) == 0x4E37F2C9
    assert int(row.astype(np.uint64).sum()) == 105144381745531


def test_noise_bits_of_chosen_ids_are_those_of_the_row():
    """Asking for a few tokens gives what the whole row has there."""
    key, ids = row_key(1, 2, 3), np.array([5, 40_000, 0, 5], dtype=np.int64)

    assert noise_bits(key, ids).tolist() == noise_bits(key, range(50_000))[ids].tolist()


def test_noise_bits_match_a_plain_integer_version():
    """A second implementation in Python's own integers agrees."""

    def plain(key: int, token: int) -> int:
        low, high = (int(word) for word in halves(key))
        x = (token + 0x9E3779B9) % 2**32
        for shift, multiplier in ((17, 0xED5AD4BB), (11, 0xAC4C1B51), (15, 0x31848BAB)):
            x = ((x ^ x >> shift) * multiplier) % 2**32
        x = ((x ^ x >> 14) + low) % 2**32
        x = ((x ^ x >> 16) * 0x7FEB352D) % 2**32 ^ high
        x = ((x ^ x >> 15) * 0x846CA68B) % 2**32
        return x ^ x >> 16

    key = row_key(3, 1, 4)

    assert noise_bits(key, range(200)).tolist() == [plain(key, token) for token in range(200)]


def test_torch_has_the_same_bits():
    """int32 tensors with masked shifts give numpy's bits, several rows at once."""
    keys = [row_key(7, 0, position) for position in range(4)]
    words = torch.from_numpy(np.array([halves(key) for key in keys], dtype=np.uint32).view(np.int32))
    table = torch.from_numpy(premix_table(1000).view(np.int32).copy())

    actual = bits_on_device(table, words[:, :1], words[:, 1:]).numpy().view(np.uint32)

    assert actual.tolist() == [noise_bits(key, range(1000)).tolist() for key in keys]


def test_every_bit_of_the_key_moves_every_bit_of_the_noise():
    """Avalanche: flipping a key bit flips each noise bit half of the time."""
    ids, keys = np.arange(1000, dtype=np.int64), [row_key(9, 0, p) for p in range(10)]
    place = np.arange(32, dtype=np.uint32)
    flipped = [
        np.mean(
            [(noise_bits(key, ids) ^ noise_bits(key ^ 1 << bit, ids))[:, None] >> place & 1 for key in keys], (0, 1)
        )
        for bit in range(64)
    ]

    assert np.abs(np.array(flipped) - 0.5).max() < 0.03  # 10,000 trials each: six standard deviations


def test_rows_are_not_copies_of_each_other():
    """The ids' own hash is neither closed under xor nor under addition, so no shift maps a row onto another."""
    first, second = (set(noise_bits(row_key(0, 0, p), range(49152)).tolist()) for p in (0, 1))

    assert len(first & second) < 8  # 0.56 expected by chance


@pytest.mark.parametrize("lag", [1, 2, 7])
def test_neighbouring_positions_and_tokens_are_independent(lag):
    """Joint counts of the leading four bits show no link between rows or between tokens."""
    rows = np.stack([noise_bits(row_key(7, 0, p), range(2048)) for p in range(60)]) >> np.uint32(28)

    def z(a, b):
        counts = np.bincount((a * 16 + b).ravel().astype(np.int64), minlength=256).astype(float)
        return chi_square_z(counts, np.full(256, counts.sum() / 256))

    assert max(z(rows[lag:], rows[:-lag]), z(rows[:, lag:], rows[:, :-lag])) < 4.75


def test_gumbel_golden_and_bounds():
    """Resolution lies at the winning end; the other end is clamped and finite."""
    actual = gumbel(np.array([0, 1, 2**31, 2**32 - 1], dtype=np.uint32)).tolist()

    assert actual == pytest.approx([22.87385695841999, 21.775244669635462, 0.36651292024576076, -2.8115409097662813])
    assert max(actual) <= G_MAX
    assert min(actual) == pytest.approx(G_MIN)


def test_gumbel_follows_its_formula():
    """-log(-log1p(-u)) with u = (x + 0.5) / 2^32, by the standard library."""
    bits = noise_bits(5, range(500))
    expected = [-math.log(-math.log1p(-min((int(x) + 0.5) / 2**32, 1 - 2**-24))) for x in bits]

    assert gumbel(bits).tolist() == pytest.approx(expected, rel=1e-14)


def test_uniform_golden():
    """One number per purpose; they never change."""
    expected = ["0x1.f0db4c11a5bf8p-3", "0x1.892abd3a92ddap-1", "0x1.09f5661847cb6p-1", "0x1.f559a383243b0p-4"]

    assert [uniform(7, 0, 3, purpose).hex() for purpose in Purpose] == expected


def test_uniforms_of_purposes_are_independent():
    """Pairs of purposes at one position fill the square evenly, and so do neighbouring positions."""
    u = np.array([[uniform(seed, 0, 5, purpose) for purpose in Purpose] for seed in range(4000)])
    pairs = [(u[:, i], u[:, j]) for i in range(4) for j in range(i)] + [(u[1:, 0], u[:-1, 0])]

    for first, second in pairs:
        counts = np.histogram2d(first, second, bins=8, range=[[0, 1], [0, 1]])[0].ravel()
        assert chi_square_z(counts, np.full(64, counts.sum() / 64)) < 4.75


def test_premix_is_a_bijection_where_it_is_used():
    """No two token ids share their noise."""
    assert len(np.unique(premix(range(300_000)))) == 300_000
