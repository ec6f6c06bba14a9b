"""What the command lines of measurements have in common."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from deploy.bench import links, schedules, tool
from specwire.law.errors import InvalidArgument, Unavailable


@pytest.mark.parametrize(
    ("text", "least", "whole", "expected"),
    [("1,8", 1, True, [1.0, 8.0]), ("0,0.5,80", 0, False, [0.0, 0.5, 80.0]), ("3", 1, True, [3.0])],
)
def test_numbers_with_commas(text: str, least: float, whole: bool, expected: list[float]) -> None:
    """As many as there are."""
    assert expected == tool.numbers("--x", text, least, whole=whole)


@pytest.mark.parametrize("text", ["", "zero", "1,,2", "-1", "nan", "inf", "1.5"])
def test_what_is_no_number_is_refused(text: str) -> None:
    """The option, what was said, and what may be."""
    with pytest.raises(InvalidArgument, match=r"--x: got .*whole numbers of at least 0"):
        tool.numbers("--x", text, 0, whole=True)


@pytest.mark.parametrize(
    ("error", "status"),
    [(InvalidArgument("--x", 1, "2"), 2), (Unavailable("nobody there"), 3), (KeyboardInterrupt(), 130)],
)
def test_a_fault_is_one_line(error: BaseException, status: int, capsys: pytest.CaptureFixture[str]) -> None:
    """And a status."""

    def work() -> int:
        raise error

    assert status == tool.run(work)
    assert 1 == len(capsys.readouterr().err.splitlines())


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_closed_terminal_ends_it_as_ctrl_c_does(number: signal.Signals) -> None:
    """So that what it has started is stopped."""
    ended = []

    def work() -> int:
        try:
            os.kill(os.getpid(), number)
            time.sleep(30.0)
        finally:
            ended.append(True)
        return 0

    before = {each: signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGHUP)}
    try:
        assert (130, [True]) == (tool.run(work), ended)
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


@pytest.mark.parametrize(
    ("main", "arguments", "said"),
    [
        (schedules.main, ["--pairs", "0"], "--pairs: got 0"),
        (schedules.main, ["--worlds", "99"], "--worlds: got '99'"),
        (schedules.main, ["--worlds", "0"], "--worlds: got '0'"),
        (schedules.main, ["--json", "/nonexistent/x.json"], "--json: got '/nonexistent/x.json'"),
        (links.main, ["--round-trips", "-5"], "--round-trips: got '-5'"),
        (links.main, ["--sessions", "0"], "--sessions: got '0'"),
        (links.main, ["--prompts", "/nope.jsonl"], "--prompts: got '/nope.jsonl'"),
        (links.main, ["--count", "-1"], "--count: got -1"),
    ],
)
def test_nothing_starts_for_what_is_asked_wrongly(
    main: object, arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Told in one line, before anything is measured."""
    assert callable(main)
    assert main(arguments) == 2
    assert capsys.readouterr().err.startswith(said)


def test_where_numbers_go_is_tried_first(tmp_path: Path) -> None:
    """A file that can be written, or none."""
    assert [None, tmp_path / "x"] == [tool.writable("--json", each) for each in (None, str(tmp_path / "x"))]
