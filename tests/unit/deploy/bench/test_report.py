"""From passes to numbers."""

from __future__ import annotations

from typing import Any

import pytest

from deploy.bench.bench import lost_workers
from deploy.bench.passes import Load
from deploy.bench.report import PARTS, advice, against_plain, anatomy, percentile, point, speculation
from specwire.v1 import inference_pb2 as pb
from specwire.v1 import types_pb2
from tests.unit.deploy.bench.made import passed, record


@pytest.mark.parametrize(
    ("values", "percent", "expected"),
    [
        ([3.0], 99, 3.0),
        ([1, 2, 3, 4, 5], 50, 3),
        ([4, 1, 3, 2], 50, 2.5),
        (list(range(101)), 95, 95),
        ([0, 10], 99, 9.9),
    ],
)
def test_percentiles_lie_between_ranks(values: list[float], percent: float, expected: float) -> None:
    """As numpy and others do by default."""
    assert percentile(values, percent) == pytest.approx(expected)


def test_a_point_of_plain_decoding() -> None:
    """Two passes of two requests: sums and percentiles over all four."""
    passes = [passed("plain", record(11.0), record(6.0)), passed("plain", record(11.0), record(6.0), wall_s=12.0)]
    found = point(passes, passes)

    assert (found["requests"], found["tokens"], found["tokens_per_s"]) == (4, 44, 2.0)
    assert found["time_per_output_token_ms"]["p50"] == pytest.approx(750)
    assert found["end_to_end_ms"]["p99"] == pytest.approx(11_000)
    assert found["ttft_ms"]["mean"] == 1_000
    assert found["bytes_per_token"] == 100
    assert "throughput_speedup" not in found


def test_a_variant_is_paired_with_the_plain_pass_beside_it() -> None:
    """Twice as fast, whatever the machine did meanwhile."""
    plain = [passed("plain", record(11.0), wall_s=10.0), passed("plain", record(21.0), wall_s=30.0)]
    fast = [passed("auto", record(6.0), wall_s=5.0), passed("auto", record(11.0, first_id=7), wall_s=15.0)]
    found = against_plain(fast, plain)

    assert found["throughput_speedup"] == {"value": 2.0, "low": 2.0, "high": 2.0, "pairs": 2}
    assert found["decode_speedup"]["value"] == pytest.approx((10 + 20) / (5 + 10))
    assert found["request_speedup"]["value"] == pytest.approx(32 / 17)
    assert found["request_speedup_by_kind"] == {"chat": pytest.approx(32 / 17)}
    assert found["answers_that_differ"] == 1


def test_answers_of_one_token_have_no_time_per_token() -> None:
    """And no decode speedup."""
    passes = [passed("plain", record(1.0, tokens=1))]
    assert point(passes, passes)["time_per_output_token_ms"] == {}
    assert against_plain(passes, passes)["decode_speedup"] is None


def test_acceptance_from_raw_counters() -> None:
    """10 blocks of 2: 6 first tokens stand and 3 second ones; each block brings one token more than stand."""
    found = speculation([record(5.0, drafted=8, accepted=(3, 1)), record(5.0, drafted=12, accepted=(3, 2))])

    assert (found["blocks"], found["drafted"], found["accepted"]) == (10, 20, 9)
    assert found["acceptance_rate"] == 0.45
    assert found["mean_acceptance_length"] == 1.9
    assert found["accepted_per_position"] == [0.6, 0.3]
    assert speculation([record(5.0)])["acceptance_rate"] is None


def test_the_parts_are_the_whole() -> None:
    """Every interval of a request's timing belongs to one part, but for sums and what is told beside."""
    beside = {"total_us", "time_to_first_token_us", "hidden_us"}
    fields = {field.name for field in pb.Timing.DESCRIPTOR.fields if field.name.endswith("_us")}
    named = [name for names in PARTS.values() for name in names]

    assert sorted(named) == sorted(fields - beside)
    assert sum(anatomy([record(5.0, tokens=10)]).values()) == pytest.approx(500)


def test_advice_is_what_is_surely_faster() -> None:
    """At one load a length wins, at the other nothing is sure."""
    two = Load(concurrency=2)
    plain = [passed("plain", record(11.0)), passed("plain", record(11.0))]
    fast = [passed("k = 2", record(6.0), wall_s=5.0), passed("k = 2", record(6.0), wall_s=5.0)]
    unsure = [passed("k = 2", record(6.0), wall_s=5.0, load=two), passed("k = 2", record(6.0), wall_s=11.0, load=two)]
    slow = [passed("plain", record(6.0), load=two), passed("plain", record(6.0), load=two)]
    told = advice([point(plain, plain), point(fast, plain), point(slow, slow), point(unsure, slow)])

    assert [(each["load"], each["choose"]) for each in told] == [("1 at once", "k = 2"), ("2 at once", "plain")]
    assert "2.00 times plain" in told[0]["why"]
    assert "nothing is surely faster" in told[1]["why"]


def test_advice_says_when_all_else_is_slower() -> None:
    """Not that it is unsure."""
    plain = [passed("plain", record(6.0), wall_s=5.0), passed("plain", record(6.0), wall_s=5.0)]
    slow = [passed("auto", record(11.0)), passed("auto", record(11.0))]
    (told,) = advice([point(plain, plain), point(slow, plain)])

    assert (
        told["why"]
        == "everything else is slower; the best of them, auto, 0.50 times plain [0.50, 0.50] (of 2 passes; 5 tell more)"
    )


def measured(variant: str, value: float, low: float, high: float) -> dict[str, Any]:
    """A point with a ratio against plain decoding, as far as advice looks at it."""
    return {
        "load": "1 at once",
        "variant": variant,
        "tokens_per_s": 10.0 * value,
        "throughput_speedup": {"value": value, "low": low, "high": high, "pairs": 5},
        "speculation": {"acceptance_rate": None, "mean_acceptance_length": None},
    }


SLOWER = "everything else is slower; the best of them, auto, "
UNSURE = "nothing is surely faster than plain decoding; the best of them, auto, "


@pytest.mark.parametrize(
    ("others", "expected"),
    [
        ([("auto", 0.97, 0.95, 0.99)], ("plain", SLOWER + "0.97 times plain [0.95, 0.99]")),
        ([("auto", 0.996, 0.99, 0.9999)], ("plain", UNSURE + "1.00 times plain [0.99, 1.00]")),
        ([("auto", 0.98, 0.97, 0.9951)], ("plain", UNSURE + "0.98 times plain [0.97, 1.00]")),
        ([("auto", 1.0, 1.0, 1.0)], ("plain", UNSURE + "1.00 times plain [1.00, 1.00]")),
        ([("auto", 1.002, 1.001, 1.004)], ("plain", UNSURE + "1.00 times plain [1.00, 1.00]")),
        ([("auto", 1.03, 1.006, 1.05)], ("auto", "1.03 times plain [1.01, 1.05]: 10.3 tokens/s against 10.0")),
        (
            [("auto", 0.95, 0.94, 0.96), ("k = 4", 0.9, 0.7, 1.1)],
            ("plain", UNSURE + "0.95 times plain [0.94, 0.96]"),
        ),
        (
            [("auto", 1.3, 0.9, 1.5), ("k = 4", 1.2, 1.1, 1.3)],
            ("k = 4", "1.20 times plain [1.10, 1.30]: 12.0 tokens/s against 10.0"),
        ),
    ],
)
def test_words_and_numbers_of_advice_agree(
    others: list[tuple[str, float, float, float]], expected: tuple[str, str]
) -> None:
    """Nothing is slower that is shown as 1.00, nor surely faster; and what is said of all others is true of each."""
    plain = measured("plain", 1.0, 1.0, 1.0)
    (told,) = advice([plain, *(measured(*each) for each in others)])

    assert expected == (told["choose"], told["why"])


def test_advice_doubts_what_was_measured_while_a_worker_was_lost() -> None:
    """Whatever it advises: half of the numbers are those of another service."""
    plain, fast = [passed("plain", record(6.0), wall_s=9.0)], [passed("auto", record(6.0), wall_s=3.0)]
    for points in ([point(plain, plain), point(fast, plain)], [point(plain, plain)]):
        (told,) = advice(points, ["target-0", "draft-0"])

        assert told["why"].endswith("; but target-0 and draft-0 went away meanwhile: measure again")


@pytest.mark.parametrize(
    ("incarnation", "connects", "state", "expected"),
    [(2, 1, "ready", []), (3, 1, "ready", ["draft-0"]), (2, 2, "ready", ["draft-0"]), (2, 1, "away", ["draft-0"])],
)
def test_a_lost_worker_is_noticed(incarnation: int, connects: int, state: str, expected: list[str]) -> None:
    """Another process, another stream, or not there: whatever is back at the end may have been away."""

    def stats(*draft: Any) -> pb.GetStatsResponse:
        told: list[Any] = [("target-0", 1, 1, "ready"), ("draft-0", *draft)]
        workers = [
            pb.WorkerStats(name=n, info=types_pb2.WorkerInfo(incarnation=i), connects=c, state=s) for n, i, c, s in told
        ]
        return pb.GetStatsResponse(workers=workers)

    assert expected == lost_workers(stats(2, 1, "ready"), stats(incarnation, connects, state))
