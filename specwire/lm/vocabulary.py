"""The token map of a tokenizer file: what each id spells, so that two models are compared by tokens and not by sizes."""

from __future__ import annotations

import os
from pathlib import Path

from specwire.law.errors import InvalidArgument


def read_vocabulary(path: str | os.PathLike[str]) -> tuple[bytes, ...]:
    """Token of each id in the tokenizer's own spelling, added tokens included; b"" where an id has no token.

    `path`: a tokenizer.json, or the folder that holds one."""
    from tokenizers import Tokenizer

    file = Path(path)
    if file.is_dir():
        file = file / "tokenizer.json"
    if not file.is_file():
        raise InvalidArgument("tokenizer", str(path), "a tokenizer.json or a folder that holds one")
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises bare Exception
        raise InvalidArgument("tokenizer", str(file), f"a readable tokenizer.json ({error})") from error
    return spell(tokenizer.get_vocab(with_added_tokens=True))


def spell(ids: dict[str, int]) -> tuple[bytes, ...]:
    """The inverse of a token map."""
    spelled = [b""] * (max(ids.values(), default=-1) + 1)
    for token, index in ids.items():
        spelled[index] = token.encode("utf-8", "surrogatepass")
    return tuple(spelled)
