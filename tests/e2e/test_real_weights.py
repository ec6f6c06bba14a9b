"""Real weights, real processes: the answer is the target's whatever speculation does, up to counted near-ties (design 4e)."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import tokenizers
import torch

from specwire.law.values import SamplingSpec
from specwire.lm import native
from specwire.lm.port import Feed
from tests.e2e.conftest import DEMO, demo_model
from tests.e2e.prompts import PROMPTS, all_prompts, chat
from tests.e2e.stack import Stack, stack
from tests.support.near_tie import Tally, rescore_by
from tests.support.service import Answer

pytestmark = pytest.mark.weights

COUNT = 32
PLAIN: dict[str, Any] = {"num_speculative_tokens": 0}
VARIANTS: dict[str, dict[str, Any]] = {
    "auto": {"num_speculative_tokens": "auto", "method": "auto"},
    "both": {"num_speculative_tokens": 4, "method": "auto"},
    "draft": {"num_speculative_tokens": 4, "method": "draft_model"},
    "ngram": {"num_speculative_tokens": 4, "method": "ngram"},
    "1": {"num_speculative_tokens": 1, "method": "draft_model"},
    "3": {"num_speculative_tokens": 3, "method": "draft_model"},
    "8": {"num_speculative_tokens": 8, "method": "auto"},
}
"""How to speculate. Under `auto` the controller may find that it does not pay, so that nothing is drafted."""
QUICK = ("auto", "both", "draft")
"""Variants of the default suite; the others are slow."""
SOLO = ("auto",)
"""Variants asked one request at a time; the others ask all at once, so that batches are ragged."""


def greedy(prompts: Sequence[str], count: int = COUNT, **fields: Any) -> list[dict[str, Any]]:
    return [{"messages": chat(text), "max_tokens": count, "temperature": 0.0, **fields} for text in prompts]


def ids_of(service: Stack, text: str) -> list[int]:
    return service.run(lambda client: client.tokenize(messages=chat(text)))


@pytest.fixture(scope="module")
def plain(service: Stack) -> list[Answer]:
    """Plain decoding of six prompts, one at a time."""
    return service.answers(greedy(PROMPTS[:6], **PLAIN))


def check_time(answer: Answer) -> None:
    """The critical path accounts for the request (design 6)."""
    assert answer.final is not None
    timing = answer.final.timing

    assert timing.unattributed_us <= 0.02 * timing.total_us


@pytest.mark.parametrize(
    "variant", [pytest.param(name, marks=[] if name in QUICK else [pytest.mark.slow]) for name in VARIANTS]
)
def test_greedy_answers_are_those_of_plain_decoding(
    variant: str, service: Stack, plain: list[Answer], tally: Tally
) -> None:
    """With the draft, with n-grams, with both; block lengths fixed and chosen; alone and in a batch."""
    answers = service.answers(greedy(PROMPTS[:6], **VARIANTS[variant]), at_once=variant not in SOLO)

    for text, expected, actual in zip(PROMPTS, plain, answers, strict=False):
        tally.compare(ids_of(service, text), expected.ids, actual.ids)
        assert expected.reason == actual.reason or expected.ids != actual.ids
        check_time(actual)
    by_model = sum(answer.speculation.accepted_by_model for answer in answers)
    by_ngram = sum(answer.speculation.accepted_by_ngram for answer in answers)
    if variant != "auto":
        assert (variant != "ngram") == (by_model > 0)
        assert (VARIANTS[variant]["method"] != "draft_model") == (by_ngram > 0)


def test_plain_decoding_drafts_nothing(plain: list[Answer]) -> None:
    """What everything is compared with is free of speculation, and its time is accounted for."""
    for answer in plain:
        assert 0 == answer.speculation.drafted
        check_time(answer)


def test_a_prompt_of_one_token(service: Stack, tally: Tally) -> None:
    """Field report 1: positions are right from the first block on."""
    request = {"prompt_ids": [7], "max_tokens": 24, "temperature": 0.0, "ignore_eos": True}
    expected = service.answer(**request, **PLAIN)
    actual = service.answer(**request, num_speculative_tokens=4, method="draft_model")

    tally.compare([7], expected.ids, actual.ids)
    assert 24 == len(actual.ids)
    assert actual.speculation.drafted_by_model > 0


def test_seeded_sampling_is_that_of_plain_decoding(service: Stack, tally: Tally) -> None:
    """Temperature and top-p: the same seed gives the same tokens with speculation on and off."""
    sampling = {"temperature": 0.8, "top_p": 0.9}
    requests = [
        {"messages": chat(text), "max_tokens": COUNT, "seed": 1000 + i, **sampling}
        for i, text in enumerate(PROMPTS[:5])
    ]
    plain = service.answers([request | PLAIN for request in requests], at_once=True)
    answers = service.answers([request | VARIANTS["8"] for request in requests], at_once=True)

    spec = SamplingSpec(**sampling)
    for text, request, expected, actual in zip(PROMPTS, requests, plain, answers, strict=False):
        tally.compare(ids_of(service, text), expected.ids, actual.ids, spec, request["seed"])
    assert sum(answer.speculation.accepted for answer in answers) > 0
    assert len({answer.ids for answer in answers}) == len(answers)


MIX: tuple[dict[str, Any], ...] = (
    PLAIN,
    VARIANTS["8"],
    PLAIN | {"temperature": 0.8, "top_p": 0.9, "seed": 11},
    VARIANTS["3"] | {"temperature": 1.0, "seed": 12},
    PLAIN,
    VARIANTS["auto"] | {"temperature": 0.6, "top_k": 20, "seed": 13},
    VARIANTS["ngram"],
    VARIANTS["1"] | {"temperature": 0.9, "min_p": 0.05, "seed": 2**64 - 1},
)


def mixed(prompts: Sequence[str], count: int) -> list[dict[str, Any]]:
    return [
        {"messages": chat(text), "max_tokens": count, "temperature": 0.0} | MIX[i % len(MIX)]
        for i, text in enumerate(prompts)
    ]


def spec_of(request: dict[str, Any]) -> SamplingSpec:
    names = ("temperature", "top_k", "top_p", "min_p")
    return SamplingSpec(**{name: request[name] for name in names if name in request})


def compare_with_solo(service: Stack, tally: Tally, prompts: Sequence[str], count: int) -> None:
    requests = mixed(prompts, count)
    alone = service.answers(requests)
    together = service.answers(requests, at_once=True)

    for text, request, expected, actual in zip(prompts, requests, alone, together, strict=True):
        tally.compare(ids_of(service, text), expected.ids, actual.ids, spec_of(request), request.get("seed", 0))


def test_eight_at_once_are_as_eight_alone(service: Stack, tally: Tally) -> None:
    """Plain and speculative, greedy and sampled, long and short blocks in one batch (field reports 65, 67, 69)."""
    compare_with_solo(service, tally, PROMPTS[:8], 20)


@pytest.mark.slow
def test_sixteen_at_once_are_as_sixteen_alone(service: Stack, tally: Tally) -> None:
    """Field report 65 at its full size: more requests than slots, half of them repetitive."""
    compare_with_solo(service, tally, (all_prompts() + list(PROMPTS))[:16], 48)


@pytest.mark.slow
def test_long_answers_are_those_of_plain_decoding(service: Stack, tally: Tally, notes: list[str]) -> None:
    """Field report 3: ten prompts, 500 tokens, blocks of two."""
    requests = greedy(PROMPTS, 500, ignore_eos=True)
    plain = service.answers([request | PLAIN for request in requests], at_once=True)
    answers = service.answers(
        [request | VARIANTS["draft"] | {"num_speculative_tokens": 2} for request in requests], True
    )

    own = Tally(tally.rescore, "float32, 500 tokens")
    for text, expected, actual in zip(PROMPTS, plain, answers, strict=True):
        assert 500 == len(actual.ids)
        own.compare(ids_of(service, text), expected.ids, actual.ids)
    notes.append(own.report())
    own.settle()


@pytest.mark.slow
def test_all_prompts(service: Stack, tally: Tally, notes: list[str]) -> None:
    """Every prompt there is, speculation as it is by default."""
    prompts = all_prompts()
    plain = service.answers(greedy(prompts, 96, **PLAIN), at_once=True)
    answers = service.answers(greedy(prompts, 96), at_once=True)

    own = Tally(tally.rescore, f"float32, {len(prompts)} prompts")
    for text, expected, actual in zip(prompts, plain, answers, strict=True):
        own.compare(ids_of(service, text), expected.ids, actual.ids)
    notes.append(own.report())
    own.settle()


@pytest.fixture(scope="module")
def half(demo: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """The demo pair in bfloat16 arithmetic, as where there is no compiler."""
    document = {role: part | {"precision": "bfloat16"} for role, part in DEMO.items()}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CC", "false")
        with stack(tmp_path_factory.mktemp("half"), document) as running:
            yield running


@pytest.mark.slow
def test_half_precision_parts_at_near_ties_only(half: Stack, notes: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """In bfloat16 answers may part, but only where rounding can decide; how often is told and not limited."""
    monkeypatch.setattr(native, "load", lambda _: None)  # the scores of `half` have rounding to be told
    own = Tally(lambda tokens: rescore_by(demo_model(precision="bfloat16", exactness="fast"))(tokens), "bfloat16")
    plain = half.answers(greedy(PROMPTS, **PLAIN), at_once=True)
    answers = half.answers(greedy(PROMPTS, **VARIANTS["3"]), at_once=True)

    for text, expected, actual in zip(PROMPTS, plain, answers, strict=True):
        own.compare(ids_of(half, text), expected.ids, actual.ids)
    notes.append(own.report())


@pytest.fixture(scope="module")
def twins(demo: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """A target that is its own draft."""
    with stack(tmp_path_factory.mktemp("twins"), DEMO | {"draft": DEMO["target"]}) as running:
        yield running


@pytest.mark.slow
@pytest.mark.parametrize("count", [4, 200])
def test_a_target_that_is_its_own_draft(count: int, twins: Stack) -> None:
    """Field report 103: full length, everything accepted (a near-tie apart), five tokens a round with a block. Rounds go on without
    one while the draft, as slow as its target, still reads the prompt."""
    (request,) = greedy(PROMPTS[2:3], count, ignore_eos=True, num_speculative_tokens=4, method="draft_model")
    answer = twins.answer(**request)

    counts = answer.speculation
    assert count == len(answer.ids)
    assert counts.drafted_by_model == counts.drafted > 0
    assert counts.accepted >= 0.98 * counts.drafted
    plain = counts.rounds - counts.drafts
    assert plain <= 4
    assert abs(counts.drafts - (count - plain) / 5) <= 2


@pytest.mark.parametrize(
    "fields",
    [
        {"messages": chat("Repeat exactly: 안녕하세요 세계 🎉👩‍👩‍👧 안녕하세요 세계 🎉👩‍👩‍👧"), "temperature": 0.0},
        {"prompt": "안녕하세요 🎉 세계, 안녕 🎉🎉 한국어 텍스트, 안녕하세요 🎉 세계", "temperature": 0.9, "seed": 2},
    ],
    ids=["copied", "wild"],
)
def test_streamed_text_is_the_text_of_the_ids(fields: dict[str, Any], service: Stack) -> None:
    """Korean and emoji, whose characters are several tokens: no character is split, lost or doubled between two events."""
    answer = service.answer(**fields, max_tokens=40, ignore_eos=True, num_speculative_tokens=4)
    expected = service.run(lambda client: client.detokenize(answer.ids, skip_special_tokens=True))

    assert expected == answer.text
    assert answer.text == "".join(chunk.text for chunk in answer.chunks) + answer.final.text
    assert not answer.text.isascii()
    if "messages" in fields:
        assert "안녕하세요" in answer.text


def test_the_chat_template_is_applied_once(service: Stack, demo: str) -> None:
    """Field report 63: one begin of each turn, as transformers renders it, and none of them in the answer."""
    from transformers import AutoTokenizer

    reference = AutoTokenizer.from_pretrained(demo)
    expected = reference.apply_chat_template(chat(PROMPTS[0]), add_generation_prompt=True, return_dict=False)
    actual = ids_of(service, PROMPTS[0])
    answer = service.answer(**greedy(PROMPTS[:1], 24, num_speculative_tokens=3, method="draft_model")[0])
    by_ids = service.answer(prompt_ids=expected, max_tokens=24, temperature=0.0, num_speculative_tokens=3)

    assert expected == actual
    assert 3 == actual.count(reference.convert_tokens_to_ids("<|im_start|>"))
    assert len(expected) == answer.started.prompt_tokens == answer.final.usage.prompt_tokens
    assert not set(reference.all_special_ids) & set(answer.ids[:-1])
    assert by_ids.text == answer.text


def teacher_forced(model: Any, tokens: list[int], seed: int) -> torch.Tensor:
    """Scores of a known text by way of verification: blocks of every length, each first refused and cut back, beside neighbours."""
    rng = random.Random(seed)
    vocab = model.spec.vocab_size
    rows = [model.forward([Feed(1, 0, tokens[:5], 5)]).clone()]
    at = 5
    while at < len(tokens):
        width = min(rng.randint(1, 9), len(tokens) - at)
        wrong = [rng.randrange(vocab) for _ in range(width)]
        neighbours = [Feed(slot, 0, [rng.randrange(vocab) for _ in range(rng.randint(1, 12))], 1) for slot in (0, 2)]
        model.forward([neighbours[0], Feed(1, at, wrong, width)])
        scores = model.forward([neighbours[0], Feed(1, at, tokens[at : at + width], width), neighbours[1]])
        rows.append(scores[1 : 1 + width].clone())
        at += width
    return torch.cat(rows)


@pytest.mark.parametrize(
    ("precision", "worst"), [("float32", 2e-3), pytest.param("bfloat16", 2.0, marks=pytest.mark.slow)]
)
def test_teacher_forced_scores_are_those_of_one_pass(precision: str, worst: float, demo: str, notes: list[str]) -> None:
    """Field report 49: at every position, after every cut, beside any neighbour, the scores are the target's own."""
    library = tokenizers.Tokenizer.from_file(f"{demo}/tokenizer.json")
    text = "The lighthouse keeper counted the ships: one, two, three, four. " * 4
    tokens = library.encode(text).ids[: 60 if precision == "float32" else 25]
    model = demo_model(precision=precision)
    expected = model.score_sequence(tokens)
    actual = teacher_forced(model, tokens, seed=3)

    seen = torch.isfinite(actual)
    difference = (actual - expected)[seen].abs()
    notes.append(
        f"teacher-forced {precision}: scores differ by at most {difference.max():.1e}, {difference.square().mean().sqrt():.1e} rms"
    )

    assert seen.all()
    assert difference.max() < worst
    if precision == "float32":
        assert torch.equal(expected.argmax(1), actual.argmax(1))
