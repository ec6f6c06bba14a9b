"""Every transcript says what the system says."""

from __future__ import annotations

from pathlib import Path

from tests.scenario.stage import Stage

RULE = "----"


def play(text: str) -> str:
    """The transcript with what is said now. Comments and blank lines stay where they are; what stood below a rule goes."""
    stage = Stage()
    out: list[str] = []
    skipping = False
    for line in text.splitlines():
        if skipping:
            skipping = bool(line.strip())
            if skipping:
                continue
        if not line.strip() or line.startswith("#"):
            out.append(line)
        elif line == RULE:
            skipping = True
        else:
            out += [line, RULE, *stage.play(line)]
            skipping = False
    return "\n".join(out) + "\n"


def test_transcript(transcript: Path, rewrite: bool) -> None:
    """Line by line."""
    expected = transcript.read_text(encoding="utf-8")
    actual = play(expected)
    if rewrite:
        transcript.write_text(actual, encoding="utf-8")
        return

    assert expected == actual


def test_a_changed_line_is_noticed(transcript: Path) -> None:
    """What stands in the file is compared, not only what is commanded."""
    text = transcript.read_text(encoding="utf-8")
    changed = text.replace("epoch=1", "epoch=9")

    assert changed != play(changed)
