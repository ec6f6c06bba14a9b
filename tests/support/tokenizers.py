"""Small tokenizers built on the spot, one per way of spelling text: no files, no downloads.

- `byte_tokenizer`: GPT-2's way, one token per byte, some longer ones, and tokens that hold half a character.
- `fallback_tokenizer`: Llama's way, pieces with "▁" for a space and one token per byte for the rest.
- `word_tokenizer`: whole words joined by spaces, without a begin token.
- `wordpiece_tokenizer`: BERT's way, "##" continues a word.
"""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import Tokenizer as Library
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

BOS, EOS, TURN = "<s>", "</s>", "<turn>"

CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ '<turn>' + message.role + '\\n' + message.content }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<turn>assistant\\n' }}{% endif %}"
)


def _byte_chars() -> list[str]:
    """Spelling of each byte in byte-level vocabularies."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(256, 512))
    return [chr(b) if b in printable else chr(next(others)) for b in range(256)]


BYTE_CHARS = _byte_chars()


def byte_tokenizer(*, bos: bool = False) -> Library:
    """Byte-level BPE: ids 0-255 are the bytes, then merges (some cut characters in the middle), then BOS, EOS and TURN."""
    vocab = {c: b for b, c in enumerate(BYTE_CHARS)}
    merges: list[tuple[str, str]] = []
    # "he", "ll", "hell", half of a three-byte character, the end of one with the beginning of the next
    for left, right in [
        (b"h", b"e"),
        (b"l", b"l"),
        (b"he", b"ll"),
        (b"\xec", b"\x95"),
        (b"\x88", b"\xeb"),
        (b"\xf0", b"\x9f"),
    ]:
        pair = ("".join(BYTE_CHARS[b] for b in left), "".join(BYTE_CHARS[b] for b in right))
        merges.append(pair)
        vocab["".join(pair)] = len(vocab)
    library = Library(models.BPE(vocab=vocab, merges=merges))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    library.add_special_tokens([BOS, EOS, TURN])
    if bos:
        library.post_processor = processors.TemplateProcessing(
            single=f"{BOS} $A", special_tokens=[(BOS, library.token_to_id(BOS))]
        )
    return library


def fallback_tokenizer() -> Library:
    """Pieces and byte tokens; adds BOS by itself; the decoder drops the space it puts before a text."""
    vocab = {"<unk>": 0, BOS: 1, EOS: 2} | {f"<0x{b:02X}>": 3 + b for b in range(256)}
    for piece in ["▁", "▁a", "b", "c", "▁ab", "你", "好", ".", "▁good"]:
        vocab[piece] = len(vocab)
    library = Library(
        models.BPE(vocab=vocab, merges=[("▁a", "b")], unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    )
    library.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    library.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    library.add_special_tokens(["<unk>", BOS, EOS])
    library.post_processor = processors.TemplateProcessing(single=f"{BOS} $A", special_tokens=[(BOS, 1)])
    return library


def word_tokenizer(words: str = "the green sky is blue and a dog runs home STOP . 你好 안녕") -> Library:
    """One token per word; an unknown word has no token at all but <unk>."""
    vocab = {word: i for i, word in enumerate(["<unk>", EOS, *words.split()])}
    library = Library(models.WordLevel(vocab=vocab, unk_token="<unk>"))
    library.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    library.add_special_tokens(["<unk>", EOS])
    return library


def wordpiece_tokenizer() -> Library:
    """Words and their continuations."""
    pieces = ["[UNK]", "[SEP]", "the", "dog", "##s", "run", "##ning", ".", "'", "s", "你"]
    library = Library(models.WordPiece(vocab={p: i for i, p in enumerate(pieces)}, unk_token="[UNK]"))
    library.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    library.decoder = decoders.WordPiece(prefix="##", cleanup=True)
    library.add_special_tokens(["[UNK]", "[SEP]"])
    return library


def save_model_folder(folder: Path, library: Library, **files: object) -> Path:
    """Writes tokenizer.json and, for each of `files`, NAME.json (dict or list) or, for text, `chat_template.jinja`."""
    folder.mkdir(parents=True, exist_ok=True)
    library.save(str(folder / "tokenizer.json"))
    for name, content in files.items():
        if isinstance(content, str):
            (folder / f"{name}.jinja").write_text(content, encoding="utf-8")
        else:
            (folder / f"{name}.json").write_text(json.dumps(content), encoding="utf-8")
    return folder
