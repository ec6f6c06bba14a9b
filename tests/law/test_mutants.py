"""A test of the tests: each seeded mistake is caught by the proofs that must catch it, under each law where it matters, and
changes nothing where it cannot. Without a mistake every proof passes."""

from __future__ import annotations

import pytest

from specwire.law.values import GREEDY, Law, Opening
from tests.law.bench import Bench
from tests.law.enumeration import Tables
from tests.law.joint import SIGNIFICANT, chi_square_p, joint_law, round_error
from tests.law.mutants import (
    CHI_SQUARE,
    DRAFT,
    ENUMERATION,
    EQUALITY,
    MISTAKES,
    PROMPT,
    SPEC,
    TARGET,
    TOKENS,
    TOP_M,
    Mistake,
)

SAMPLES = 600
SEQUENCES = 12
LONG = 10
LAW_OF = {
    "shared_noise": (Law.SHARED_NOISE, SPEC),
    "greedy": (Law.SHARED_NOISE, GREEDY),
    "rejection": (Law.REJECTION, SPEC),
}
PROOFS = {"rejection": (ENUMERATION, CHI_SQUARE), "shared_noise": (EQUALITY,), "greedy": (EQUALITY,)}


def openings(name: str, count: int) -> list[Opening]:
    """One per seed; greedy needs only one."""
    law, spec = LAW_OF[name]
    return [Opening(law, spec, seed, 0, len(PROMPT)) for seed in range(1 if name == "greedy" else count)]


def enumeration_holds() -> bool:
    """One round, from the draft's draw to the verdict, is exact to rounding."""
    return round_error(Tables(4, seed=7, spread=0.6), SPEC, TOP_M) < 1e-12


def chi_square_holds() -> bool:
    """Whole answers by blocks of 1, 2 and 3 follow the exact joint law."""
    bench = Bench(TARGET, DRAFT, TOP_M)
    shares = [openings("rejection", SAMPLES)[k::3] for k in range(3)]
    samples = [text for k, share in enumerate(shares, 1) for text in bench.run(share, PROMPT, TOKENS, k)]
    return chi_square_p(samples, EXACT) >= SIGNIFICANT


def equality_holds(name: str) -> bool:
    """Answers with blocks are those without."""
    asked = openings(name, SEQUENCES)
    return all(Bench(TARGET, DRAFT).run(asked, PROMPT, LONG, k) == PLAIN[name] for k in (1, 3))


EXACT = joint_law(TARGET, PROMPT, SPEC, TOKENS)
PLAIN = {
    name: Bench(TARGET, DRAFT).run(openings(name, SEQUENCES), PROMPT, LONG, 0) for name in ("shared_noise", "greedy")
}


def holds(proof: str, law: str) -> bool:
    """Whether a proof passes."""
    return {ENUMERATION: enumeration_holds, CHI_SQUARE: chi_square_holds, EQUALITY: lambda: equality_holds(law)}[
        proof
    ]()


@pytest.mark.parametrize("law", LAW_OF)
def test_without_a_mistake_every_proof_passes(law: str) -> None:
    """Else it would prove nothing that they fail with one."""
    assert [True] * len(PROOFS[law]) == [holds(proof, law) for proof in PROOFS[law]]


@pytest.mark.parametrize("law", LAW_OF)
@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.what)
def test_a_mistake_is_caught_where_it_matters_and_only_there(
    mistake: Mistake, law: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The proofs named for this law fail; where none is named the mistake cannot matter, and all proofs of the law pass."""
    must_catch = getattr(mistake, law)
    mistake.patch(monkeypatch)
    proofs = must_catch or PROOFS[law]

    assert [not must_catch] * len(proofs) == [holds(proof, law) for proof in proofs]
