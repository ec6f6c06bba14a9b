"""What people see, read off the text itself."""

from __future__ import annotations

import dataclasses
import io
import json

import pytest
from rich.console import Console, RenderableType

from deploy import render
from specwire.client import Final
from specwire.v1 import inference_pb2 as pb
from specwire.v1 import types_pb2


def text(view: RenderableType) -> list[str]:
    """Lines as printed, without trailing blanks and empty lines."""
    console = Console(file=io.StringIO(), width=140, no_color=True)
    console.print(view)
    out: io.StringIO = console.file  # type: ignore[assignment]
    return [line.rstrip() for line in out.getvalue().splitlines() if line.strip()]


SPECULATION = pb.SpeculationStats(
    rounds=10,
    drafts=9,
    drafted=30,
    accepted=15,
    drafted_by_model=20,
    accepted_by_model=8,
    drafted_by_ngram=10,
    accepted_by_ngram=7,
    fallbacks=1,
)
TIMING = pb.Timing(
    total_us=1_000_000,
    admission_us=1_000,
    draft_compute_us=90_000,
    target_compute_us=880_000,
    target_transfer_us=9_000,
    coordinator_us=15_000,
    unattributed_us=5_000,
    hidden_us=40_000,
    time_to_first_token_us=120_000,
    wire_bytes=1_500,
)
FINAL = Final(
    finish_reason="stop",
    stop="\n\n",
    text="",
    usage=pb.Usage(prompt_tokens=7, completion_tokens=25),
    seed=42,
    speculation=SPECULATION,
    timing=TIMING,
    rounds=(),
)


def test_rates_have_a_value_also_for_nothing() -> None:
    """Zero drafted tokens divide nothing (report 99)."""
    assert ("-", "0.50") == (render.ratio(0, 0), render.ratio(1, 2))
    assert "plain decoding, 0 rounds" == render.speculation(pb.SpeculationStats())


def test_milliseconds_keep_about_three_figures() -> None:
    """No false precision."""
    assert ["0.00", "0.05", "9.99", "12.3", "1235"] == [
        render.milliseconds(us) for us in (0, 50, 9_990, 12_340, 1_234_567)
    ]


def test_durations_for_people() -> None:
    """Seconds, minutes, hours."""
    assert ["0 s", "119 s", "2 min", "2.0 h"] == [render.duration(s) for s in (0.2, 119, 121, 7200)]


def test_the_summary_tells_of_time_lost() -> None:
    """A target that was killed in mid-answer leaves no trace in the text; half a second is told, some milliseconds are not."""
    lost = dataclasses.replace(FINAL, timing=pb.Timing(total_us=1_000_000, recovery_us=520_000))
    hardly = dataclasses.replace(FINAL, timing=pb.Timing(total_us=1_000_000, recovery_us=5_000))

    assert "; 0.5 s for lost workers and late drafts" in render.summary(lost)
    assert "lost workers" not in render.summary(hardly)


def test_the_summary_counts_the_added_token_of_each_round() -> None:
    """Tokens per round = (accepted + rounds) / rounds; acceptance = accepted / drafted."""
    assert (
        "25 tokens in 1.00 s (25.00 per s, first after 0.12 s); 10 rounds of 2.50 tokens, acceptance 0.50 "
        "(draft 8/20, n-gram 7/10), 1 fallback; 7 prompt tokens; finish stop at '\\n\\n'; seed 42"
    ) == render.summary(FINAL)


def test_the_parts_of_a_request_and_their_total() -> None:
    """Every part that took time, the unattributed rest always, hidden time outside the sum."""
    rows = {line.split("  ")[0].strip(): line.split() for line in text(render.timing(TIMING, 10))}

    assert ["88.0", "%"] == rows["target compute"][-3:-1]
    assert ["5.00", "0.5", "%", "0.50"] == rows["unattributed"][-4:]
    assert ["1000", "100.0", "%", "100.00"] == rows["total"][-4:]
    assert ["40.0", "4.0", "%", "4.00"] == rows["hidden (draft beside target)"][-4:]
    assert "draft queue" not in rows


def test_a_request_of_no_rounds_divides_by_none() -> None:
    """A request that ended before its first round."""
    assert any("-" in line for line in text(render.timing(pb.Timing(), 0)))


def test_rounds_have_a_line_each() -> None:
    """Where a block came from, what stood, what it cost."""
    listed = [
        pb.Round(index=0, drafted=4, accepted=2, committed=3, source="draft_model", total_us=40_000, step_rows=5),
        pb.Round(index=1, committed=1, total_us=30_000, target_compute_us=29_000, step_rows=1, step_sessions=1),
    ]
    lines = [line.split() for line in text(render.rounds(listed))[-2:]]

    assert ["0", "draft_model", "4", "2", "3", "40.0"] == lines[0][:6]
    assert ["1", "none", "0", "0", "1", "30.0"] == lines[1][:6]


def stats() -> pb.GetStatsResponse:
    """A service with one worker ready and one away."""
    target = pb.WorkerStats(
        name="target-0",
        address="127.0.0.1:5000",
        state="ready",
        sessions=1,
        compute_us=37_000,
        info=types_pb2.WorkerInfo(
            model="/cache/models/demo/", device="cpu", precision="bfloat16", threads=2, max_sessions=8, node="host:12"
        ),
    )
    draft = pb.WorkerStats(name="draft-0", state="lost", reason="no heartbeat")
    return pb.GetStatsResponse(
        version="0.1.0",
        uptime_s=3.0,
        ready=True,
        running=1,
        max_running=8,
        max_waiting=64,
        speculation=SPECULATION,
        workers=[target, draft],
        recent_acceptance=0.6,
        replays={"target_lost": 2},
        fallbacks={"draft_timeout": 1},
    )


@pytest.mark.parametrize(
    ("setting", "expected"),
    [("run-ahead", ""), ("", ""), ("auto", " (auto asked for)"), ("synchronous", " (synchronous asked for)")],
)
def test_the_schedule_and_what_was_asked_for(setting: str, expected: str) -> None:
    """The second only where it is another; a service of before does not say it."""
    told = stats()
    told.schedule, told.schedule_setting = "run-ahead", setting

    assert text(render.status(told, "a:1"))[3].endswith(f"schedule now: run-ahead{expected}")


@pytest.mark.parametrize(("count", "expected"), [(0, "0 tokens"), (1, "1 token"), (2, "2 tokens")])
def test_one_is_singular(count: int, expected: str) -> None:
    """Everywhere that things are counted."""
    assert expected == render.counted(count, "token")


def test_the_state_of_the_service() -> None:
    """Readiness, requests, acceptance, causes, and every worker with its reason."""
    lines = text(render.status(stats(), "127.0.0.1:8470"))

    assert "Specwire 0.1.0 at 127.0.0.1:8470: ready, up 3 s" == lines[0]
    assert lines[1].startswith("requests: 1/8 running, 0/64 waiting")
    assert "tokens: 0 generated; 10 rounds of 2.50 tokens, acceptance 0.50" in lines[2]
    assert lines[2].endswith("; recently 0.60")
    assert ["replays: target_lost 2", "fallbacks: draft_timeout 1"] == lines[4:6]
    assert [
        "target-0",
        "ready",
        "demo",
        "cpu",
        "x2",
        "bfloat16",
        "1/8",
        "37.0",
        "-",
        "host:12",
        "127.0.0.1:5000",
    ] == lines[-2].split()
    assert "lost: no heartbeat" in lines[-1]


def test_messages_become_plain_values() -> None:
    """64-bit numbers stay numbers, absent ones are left out, maps and lists are theirs."""
    found = render.plain(stats())
    bare = render.plain(pb.GetStatsResponse())

    assert json.loads(json.dumps(found)) == found
    assert (0, {"target_lost": 2}, 0.6) == (found["generated_tokens"], found["replays"], found["recent_acceptance"])
    assert ("ROLE_UNSPECIFIED", "target-0") == (found["workers"][0]["info"]["role"], found["workers"][0]["name"])
    assert ("recent_acceptance" in bare, bare["workers"]) == (False, [])
