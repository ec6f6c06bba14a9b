"""What the tests ask: short prompts of the kinds that matter. Answers to the last ones copy from the prompt, the others do not."""

from __future__ import annotations

import json
import os
from pathlib import Path

PROMPTS = (
    "What is the difference between a lake and a pond?",
    "Write a Python function that counts the vowels in a string.",
    "Tell me a short story about a lighthouse keeper and a whale.",
    "Summarise in one sentence: The town library was built in 1904, burned down in 1951, and was rebuilt by volunteers.",
    "Repeat this list exactly: apples, pears, plums, cherries, apricots, peaches, apples, pears, plums, cherries.",
    "Correct the spelling and change nothing else: The quick brwon fox jumps over the lasy dog near the old mill.",
    "List every date in this text: We met on 3 May 2019, again on 7 June 2020, and for the last time on 9 July 2021.",
    "How do I boil an egg?",
    "Explain recursion to a ten-year-old.",
    "Replace every 'cat' by 'dog': The cat saw the other cat while the third cat slept on the cat's mat.",
)


def all_prompts() -> list[str]:
    """Those of the file that SPECWIRE_PROMPTS names (JSONL with `prompt`), else the ones above."""
    path = os.environ.get("SPECWIRE_PROMPTS")
    if path is None:
        return list(PROMPTS)
    return [json.loads(line)["prompt"] for line in Path(path).read_text().splitlines() if line.strip()]


def chat(text: str) -> list[dict[str, str]]:
    """As a conversation of one message."""
    return [{"role": "user", "content": text}]
