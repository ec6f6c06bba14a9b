"""The compiled layers: the function that torch computes, and no row that depends on others, to the last bit."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import random
import re
import shutil
import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specwire.lm import native
from specwire.lm.fused import FusedBody
from specwire.lm.int8 import quantize
from specwire.lm.linear import FbgemmLinear
from specwire.lm.load import ModelConfig
from specwire.lm.native_layers import NativeLinear
from specwire.lm.port import Feed
from specwire.lm.torch_lm import TorchModel
from specwire.lm.torch_load import load_torch_model
from tests.unit.lm.tiny import CONTEXT, VOCAB, refuse

if not (native._cpu_has_instructions() and (shutil.which("cc") or shutil.which("gcc"))):
    pytest.skip("needs Linux, AVX2 and a C compiler", allow_module_level=True)
LIBRARIES = {kept: native.load(kept) for kept in native.KEPT}

KINDS = [
    "llama",
    "llama_heads",
    "llama_shared_keys",
    "llama_long_heads",
    "llama_biased",
    "qwen2",
    "qwen3",
    "qwen3_wide",
    "mistral",
]
PRECISIONS = ["float16", "bfloat16", "float32"]
Load = Callable[..., TorchModel]


@pytest.fixture
def threads() -> Iterator[Callable[[int], None]]:
    """Sets the number of compute threads, for this test."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def test_it_compiles() -> None:
    """Where there is a compiler. All other tests here need it."""
    assert None not in LIBRARIES.values()


def text(length: int = CONTEXT) -> list[int]:
    rng = random.Random(length)
    return [rng.randrange(VOCAB) for _ in range(length)]


def one_by_one(model: TorchModel, tokens: list[int], slot: int = 0) -> torch.Tensor:
    """Plain decoding. -> [tokens, columns]."""
    return torch.cat([model.forward([Feed(slot, at, [token], 1)]).clone() for at, token in enumerate(tokens)])


# ---------------------------------------------------------------- one product


def rounding(kept: torch.dtype) -> float:
    """Of a product: halves are the first sixteen bits of an input."""
    library = LIBRARIES[kept]
    return 3e-5 if library is not None and library.arithmetic == "halves" else 1e-5


@functools.cache
def layer(
    outputs: int, inputs: int, biased: bool, stored: torch.dtype
) -> tuple[NativeLinear, torch.Tensor, torch.Tensor | None]:
    """A layer and its weights."""
    generator = torch.Generator().manual_seed(outputs)
    weight = torch.randn(outputs, inputs, generator=generator)
    if stored is torch.int8:
        whole, scale = quantize(weight)
        weight = whole * scale[:, None]
    else:
        weight = weight.to(stored).float()
    bias = torch.randn(outputs, generator=generator) if biased else None
    return NativeLinear(LIBRARIES[stored], weight, bias), weight, bias


@settings(deadline=None)
@given(
    rows=st.integers(1, 120),
    outputs=st.sampled_from([1, 7, 8, 9, 64, 131]),
    inputs=st.sampled_from([8, 24, 32, 200, 680]),
    biased=st.booleans(),
    stored=st.sampled_from(list(native.KEPT)),
    seed=st.integers(0, 2**32),
)
def test_a_product_is_that_of_float64_and_of_each_row_alone(
    rows: int, outputs: int, inputs: int, biased: bool, stored: torch.dtype, seed: int
) -> None:
    """Numbers of rows that fill no group, outputs that fill no block, inputs that fill no line of the cache."""
    linear, weight, bias = layer(outputs, inputs, biased, stored)
    x = torch.randn(rows, inputs, generator=torch.Generator().manual_seed(seed))

    actual = linear(x)

    exact = torch.nn.functional.linear(x.double(), weight.double(), None if bias is None else bias.double())
    torch.testing.assert_close(actual.double(), exact, rtol=1e-5, atol=rounding(stored) * inputs**0.5)
    assert torch.equal(actual, torch.cat([linear(x[r : r + 1]) for r in range(rows)]))


def libraries_of_this_cpu(kept: torch.dtype) -> list[native.Library]:
    """All that can be had, best first: compiler and system may know less than the CPU, but not of the last."""
    *better, last = native._instructions(kept)
    found = []
    for each in better:
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            found.append(native._library(kept, *each))
    return [*found, native._library(kept, *last)]


@pytest.mark.parametrize("kept", list(native.KEPT), ids=str)
def test_the_same_sums_have_the_same_bits_with_any_instructions(kept: torch.dtype) -> None:
    """A session may go on at a target on another machine."""
    libraries = libraries_of_this_cpu(kept)
    generator = torch.Generator().manual_seed(1)
    for inputs in (24, 200, 1536):
        weight, bias = torch.randn(131, inputs, generator=generator), torch.randn(131, generator=generator)
        for rows in (*range(1, 15), 30, 60):
            x = torch.randn(rows, inputs, generator=generator)
            found = [(each.arithmetic, NativeLinear(each, weight, bias)(x)) for each in libraries]

            for arithmetic, result in found:
                torch.testing.assert_close(result, found[-1][1], rtol=1e-4, atol=3e-5 * inputs**0.5)
                assert arithmetic == "halves" or torch.equal(result, found[-1][1])


@pytest.mark.parametrize("kind", KINDS)
def test_attention_has_the_same_bits_with_any_instructions(
    kind: str, checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of a step, of texts that blocks of cells and of tokens do not divide."""
    feeds = [Feed(0, 0, text(37), 5), Feed(1, 0, text(18), 18), Feed(2, 0, text(1), 1)]
    libraries = libraries_of_this_cpu(torch.float16)
    if len(libraries) < 2:
        pytest.skip("CPU and compiler know one set of instructions")
    config = ModelConfig(model=str(checkpoint(kind)), max_context=CONTEXT, max_sessions=3, precision="float16")
    found = []
    for library in libraries:
        monkeypatch.setattr(native, "load", lambda _, only=library: only)
        model = load_torch_model(config)
        assert model.compiled
        found.append((model.forward(feeds).clone(), model.forward([Feed(0, 37, text(9), 9)])))

    for prompt, block in found:
        assert torch.equal(prompt, found[-1][0])
        assert torch.equal(block, found[-1][1])


@pytest.mark.parametrize("fails", ["compiler", "system"])
def test_what_the_system_refuses_is_done_without(
    fails: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The next best instructions; nothing to warn of, but it is told who asks."""
    expected = native._instructions(torch.bfloat16)
    refusing = "-Dspecwire_prepare(x)=specwire_prepare(x) { return 1; } int other(x)"
    wrong = ("-no-such-flag",) if fails == "compiler" else (refusing,)
    monkeypatch.setattr(native, "_instructions", lambda _: [("sums", wrong), *expected[-1:]])
    caplog.set_level(logging.INFO)
    native.load.cache_clear()
    try:
        found = native.load(torch.bfloat16)
    finally:
        native.load.cache_clear()

    assert found is not None
    (record,) = (each for each in caplog.records if "do without" in each.getMessage())
    assert (logging.INFO, True) == (
        record.levelno,
        {"compiler": "no-such-flag", "system": "does not allow sums"}[fails] in record.getMessage(),
    )


@pytest.mark.parametrize(
    ("flags", "kept", "expected"),
    [
        ("avx512_bf16 amx_tile amx_bf16", torch.bfloat16, ["halves", "sums", "sums"]),
        ("avx512_bf16 amx_tile", torch.bfloat16, ["sums", "sums"]),
        ("avx512_bf16 amx_tile amx_bf16", torch.float16, ["sums", "sums"]),
        ("", torch.bfloat16, ["sums", "sums"]),
    ],
)
def test_tiles_need_all_of_their_instructions(
    flags: str, kept: torch.dtype, expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A virtual machine may have some."""
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")
    monkeypatch.setattr(native, "_cpuinfo", lambda: f"flags : fpu {flags} avx")

    assert expected == [arithmetic for arithmetic, _ in native._instructions(kept)]


@pytest.mark.parametrize("wrong", [torch.float64, torch.float16])
def test_inputs_of_another_kind_are_refused(wrong: torch.dtype) -> None:
    """C would read them as they are not."""
    linear, _, _ = layer(9, 32, False, torch.float32)

    with pytest.raises(AssertionError):
        linear(torch.ones(3, 32, dtype=wrong))


@pytest.mark.parametrize("stored", [torch.float32, torch.float16, torch.int8], ids=str)
def test_small_numbers_are_kept_whatever_the_caller_set(stored: torch.dtype, threads: Callable[[int], None]) -> None:
    """Rounding is a thread's own: results must not depend on who takes which part of the work."""
    threads(2)
    linear, _, _ = layer(512, 32, False, stored)
    x = torch.randn(3, 32) * 1e-38
    expected = linear(x)
    assert torch.set_flush_denormal(True)
    try:
        actual = linear(x)
        flushes = not (torch.full((1,), 1e-39) * 1.0).any()
    finally:
        torch.set_flush_denormal(False)

    assert flushes  # still set: it was the caller's
    assert expected.abs().min() < 1e-38
    assert torch.equal(expected, actual)


def test_a_product_takes_any_shape_and_stride() -> None:
    """[..., inputs], views included."""
    linear, weight, _ = layer(7, 24, False, torch.float16)
    x = torch.randn(2, 48, 5)[:, ::2].transpose(1, 2)

    actual = linear(x)

    assert actual.shape == (2, 5, 7)
    torch.testing.assert_close(actual, torch.nn.functional.linear(x, weight), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("stored", list(native.KEPT), ids=str)
def test_not_a_number_stays_in_its_row(stored: torch.dtype) -> None:
    linear, _, _ = layer(9, 32, False, stored)
    x = torch.ones(7, 32)
    x[3, 5] = torch.nan

    assert [r == 3 for r in range(7)] == linear(x).isnan().all(dim=1).tolist()
    assert 9 == linear(x).isnan().sum()


# ---------------------------------------------------------------- all layers


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("precision", ["float16", "float32"])
def test_layers_are_those_of_transformers(kind: str, precision: str, load: Load) -> None:
    """The same ragged passes through both, with cut-backs."""
    compiled = load(kind, compiled=True, precision=precision)
    plain = load(kind, precision=precision, fused=False)
    assert compiled.compiled
    assert not plain.compiled
    tokens = text()

    for feeds in (
        [Feed(0, 0, tokens[:33], 3), Feed(1, 0, tokens[:5], 5), Feed(3, 0, tokens[2:4], 1)],
        [Feed(0, 21, tokens[:9], 9), Feed(1, 5, [8], 1), Feed(3, 1, tokens[:20], 3)],
        [Feed(1, 6, tokens[:58], 58), Feed(2, 0, tokens, 1)],
    ):
        expected, actual = plain.forward(feeds), compiled.forward(feeds)
        assert (actual - expected).abs().max() < 1e-5 * expected.abs().max()


@pytest.mark.parametrize("kind", KINDS)
def test_bfloat16_is_that_of_the_weights(kind: str, load: Load) -> None:
    """Arithmetic is float32, or nearly: what transformers does with the same weights in float32."""
    model = load(kind, compiled=True, precision="bfloat16")
    assert model.compiled
    expected = model.score_sequence(text(), torch.float32)

    actual = model.forward([Feed(0, 0, text(), CONTEXT)])

    bound = 1e-4 if model.arithmetic == "halves" else 1e-5
    assert (actual - expected).abs().max() < bound * expected.abs().max()
    assert (load(kind, precision="float32").forward([Feed(0, 0, text(), CONTEXT)]) - expected).abs().max() > 1e-3


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("precision", "exactness"), [("float16", "fast"), ("bfloat16", "fast"), ("float32", "fast"), ("float32", "strict")]
)
def test_no_row_depends_on_the_pass(kind: str, precision: str, exactness: str, load: Load) -> None:
    """Bit for bit: token by token, in blocks, in prompt chunks, with any neighbours, after refused blocks; `strict` or not."""
    model = load(kind, compiled=True, precision=precision, exactness=exactness, max_block=4)
    tokens = text()
    expected = one_by_one(model, tokens)
    rng = random.Random(3)
    for slot in (0, 2):
        at, actual = 0, []
        while at < CONTEXT:
            width = min(rng.choice([1, 2, 3, 5, 6, 7, 9, 30]), CONTEXT - at)
            wrong = [(token + 1) % VOCAB for token in tokens[at : at + width]]
            model.forward([Feed(slot, at, wrong, rng.randint(0, width))])  # refused
            neighbours = [Feed(n, 0, text(rng.randint(1, 20)), 1) for n in (1, 3) if rng.random() < 0.5]
            feeds = [*neighbours, Feed(slot, at, tokens[at : at + width], width)]
            actual.append(model.forward(feeds)[len(neighbours) :].clone())
            at += width

        assert torch.equal(torch.cat(actual), expected)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_copied_beginning_goes_on_as_if_it_had_been_read(kind: str, precision: str, load: Load) -> None:
    """Bit for bit, whatever the target held, not-a-numbers too; and the source goes on as it would have."""
    model = load(kind, compiled=True, precision=precision)
    tokens = text()
    expected = one_by_one(model, tokens)
    for length in (0, 1, 20, 40):
        model.forward([Feed(0, 0, tokens[:40], 0), Feed(2, 0, text(50), 0)])
        for storage in (*model._kv._keys.values(), *model._kv._values.values()):
            storage[2] = torch.nan

        model.copy(0, 2, length)

        wrong = [(token + 1) % VOCAB for token in tokens[length : length + 3]]
        model.forward([Feed(2, length, wrong, 3)])  # refused
        actual = model.forward([Feed(2, length, tokens[length:], CONTEXT - length), Feed(0, 40, tokens[40:], 24)])
        assert torch.equal(torch.cat([expected[length:], expected[40:]]), actual)
        assert not any(storage[2].isnan()[:, :CONTEXT].any() for storage in model._kv._keys.values())


def test_a_compiled_model_copies_nothing_it_does_not_hold(load: Load) -> None:
    """Refused before anything is written, as by any other."""
    model = load("llama", compiled=True)
    start = [Feed(0, 0, text(9), 0), Feed(1, 0, text(5), 0)]
    more = [Feed(0, 9, [7], 1), Feed(1, 5, [7], 1)]
    model.forward(start)
    expected = model.forward(more).clone()
    model.forward(start)
    for arguments in ((0, 1, 10), (0, 0, 3), (0, 4, 3), (-1, 1, 0), (0, 1, -1)):
        with pytest.raises(ValueError, match="slot"):
            model.copy(*arguments)

    assert torch.equal(expected, model.forward(more))


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("count", [1, 2, 3, 7])
def test_no_row_depends_on_the_threads(count: int, precision: str, load: Load, threads: Callable[[int], None]) -> None:
    model = load("llama_long_heads", compiled=True, precision=precision)
    tokens = text()
    threads(1)
    expected = model.forward([Feed(0, 0, tokens, CONTEXT)]).clone()

    threads(count)

    assert torch.equal(model.forward([Feed(0, 0, tokens, CONTEXT)]), expected)


def test_several_models_at_once(checkpoint: Callable[[str], Path], threads: Callable[[int], None]) -> None:
    """Each on its own thread, with helpers that come late as often as not: two share theirs, one has another library."""
    threads(3)
    models = [
        load_torch_model(ModelConfig(model=str(checkpoint(kind)), max_sessions=1, precision=precision))
        for kind, precision in zip(KINDS, ("float32", "float32", "bfloat16"), strict=False)
    ]
    expected = [model.forward([Feed(0, 0, text(), CONTEXT)]).clone() for model in models]
    wrong: list[int] = []

    def work(index: int) -> None:
        for _ in range(50):
            actual = models[index].forward([Feed(0, 0, text(), CONTEXT)])
            wrong.extend([] if torch.equal(actual, expected[index]) else [index])

    all_of_them = [threading.Thread(target=work, args=(index,)) for index in range(3)]
    for each in all_of_them:
        each.start()
    for each in all_of_them:
        each.join(60)

    assert [False] * 3 == [each.is_alive() for each in all_of_them]
    assert [] == wrong


def until_all_sleep() -> None:
    """Waits until no other thread of this process is at work."""
    until = time.monotonic() + 10
    while time.monotonic() < until:
        tasks = [path for path in Path("/proc/self/task").iterdir() if int(path.name) != threading.get_native_id()]
        states = []
        for path in tasks:
            with contextlib.suppress(OSError):
                states.append((path / "stat").read_text().rpartition(")")[2].split()[0])
        if "R" not in states:
            return


def test_a_forked_process_computes_too() -> None:
    """It has no helpers, and starts its own, also where those of its parent slept; and each time that its own slept. In a process
    in which nothing else has threads, as other libraries of the tests' own do after a fork."""
    script = "from tests.unit.lm.test_native import fork_and_compute as run; run('float16'); run('bfloat16')"

    subprocess.run([sys.executable, "-c", script], cwd=Path(__file__).parents[3], check=True, timeout=120)


def fork_and_compute(stored: str) -> None:
    """Raises AssertionError unless a child computes what its parent does, with a helper of its own."""
    torch.set_num_threads(2)
    linear, _, _ = layer(64, 200, False, getattr(torch, stored))
    x = torch.randn(30, 200)
    expected = linear(x)
    until_all_sleep()
    child = os.fork()
    if not child:
        signal.alarm(30)  # a lock that nobody gives back
        for _ in range(4):
            if not torch.equal(linear(x), expected):
                os._exit(1)
            until_all_sleep()
        os._exit(0 if len(list(Path("/proc/self/task").iterdir())) == 2 else 2)

    assert (child, 0) == os.waitpid(child, 0)


def test_not_a_number_in_one_text_is_told_and_stays_there(load: Load) -> None:
    """Of a cache that holds one: that text's scores are none, so its request fails; the neighbour's are what they were."""
    model = load("llama", compiled=True)
    feeds = [Feed(0, 0, text(9), 1), Feed(1, 0, text(14), 1)]
    expected = model.forward(feeds).clone()
    model._kv.both(0, 4, 8)[0, :, 3] = torch.nan

    actual = model.forward([Feed(0, 9, [1], 1), Feed(1, 13, text(14)[13:], 1)])

    assert bool(actual[0].isnan().all())
    assert torch.equal(actual[1], expected[1])
    assert torch.equal(model.forward(feeds), expected)


@pytest.mark.parametrize("kind", ["llama", "llama_long_heads", "llama_shared_keys"])
def test_not_a_number_is_not_seen_by_those_before_it(kind: str, checkpoint: Callable[[str], Path]) -> None:
    """Tokens of a block attend together, and none sees the next one: not even with a share of nothing."""
    model = load_torch_model(ModelConfig(model=str(checkpoint(kind)), max_context=CONTEXT, precision="float16"))
    assert model._native is not None
    tokens = text(8)
    model.forward([Feed(0, 0, tokens[:4], 1)])
    expected = model.forward([Feed(0, 4, tokens[4:], 4)]).clone()
    nowhere = VOCAB - 1
    with torch.inference_mode():
        model._native._kept[0].embeddings[nowhere] = torch.nan

    for rows in (1, 2, 3):
        actual = model.forward([Feed(0, 4, [*tokens[4 : 4 + rows], *[nowhere] * (4 - rows)], 4)])

        assert torch.equal(actual[:rows], expected[:rows])
        assert bool(actual[rows:].isnan().all())


def test_scores_far_apart(load: Load) -> None:
    """Keys a thousand times as long: one cell takes all of the attention, and nothing overflows."""
    model, plain = load("llama", compiled=True), load("llama", fused=False)
    tokens = text(30)
    for each in (model, plain):
        each.forward([Feed(0, 0, tokens, 1)])
        for keys in each._kv._keys.values():
            keys[0] *= 1000.0

    expected = plain.forward([Feed(0, 30, [5], 1)])

    torch.testing.assert_close(model.forward([Feed(0, 30, [5], 1)]), expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_another_default_dtype_changes_nothing(dtype: torch.dtype, checkpoint: Callable[[str], Path]) -> None:
    """transformers sets it while it loads a model, perhaps beside one that runs."""
    model = load_torch_model(ModelConfig(model=str(checkpoint("llama")), max_sessions=1))
    assert model.compiled
    expected = one_by_one(model, text())
    torch.set_default_dtype(dtype)
    try:
        model = load_torch_model(ModelConfig(model=str(checkpoint("llama")), max_sessions=1))
        actual = one_by_one(model, text())
    finally:
        torch.set_default_dtype(torch.float32)

    assert torch.equal(actual, expected)


@pytest.mark.parametrize(
    ("kind", "settings"),
    [("llama_odd_heads", {}), ("gpt2", {}), ("gpt2", {"precision": "bfloat16"}), ("llama", {"fused": False})],
)
def test_what_does_not_fit_is_left_alone(
    kind: str, settings: dict[str, Any], checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wholly: no product of it is compiled, and nobody is asked for a compiler."""
    monkeypatch.setattr(native, "_load", lambda *_: pytest.fail("asked"))
    native.load.cache_clear()
    try:
        model = load_torch_model(ModelConfig(model=str(checkpoint(kind)), max_sessions=1, **settings))
    finally:
        native.load.cache_clear()

    assert not model.compiled
    assert not any(isinstance(module, NativeLinear) for module in model._model.modules())


def test_the_fingerprint_tells_them_apart(load: Load) -> None:
    """Same fingerprint, same answers: but for near-ties these have the same."""
    assert load("llama").spec.fingerprint != load("llama", compiled=True).spec.fingerprint


# ---------------------------------------------------------------- compiling


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """Nothing is loaded and nothing in the cache; compiling takes a fifth of its time. Yields the cache folder."""
    monkeypatch.setattr(native, "_FLAGS", tuple(flag.replace("-O3", "-O0") for flag in native._FLAGS))
    monkeypatch.setenv("SPECWIRE_CACHE", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    native.load.cache_clear()
    yield tmp_path
    native.load.cache_clear()


def script(path: Path, body: str) -> str:
    path.write_text(f"#!/bin/sh\n{body}\n", encoding="utf-8")
    path.chmod(stat.S_IRWXU)
    return str(path)


def load_elsewhere() -> None:
    """In a process of its own, since a library that is loaded is not read again."""
    code = (
        f"import torch; from specwire.lm import native; native._FLAGS = {native._FLAGS}; "
        "assert native.load(torch.float16) is not None"
    )
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True)
    assert (0, "") == (done.returncode, done.stderr)


def made_in(cache: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (cache / "native").iterdir()}


def test_compiled_once(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next process finds the library, for which a compiler is asked its version and no more; nothing else is in the cache."""
    assert native.load(torch.float16) is not None
    made = made_in(fresh)
    assert [".sha256", ".so"] == sorted(Path(name).suffix for name in made)
    native.load.cache_clear()
    asked: list[list[str]] = []
    run = native._run
    monkeypatch.setattr(native, "_run", lambda command, text="": asked.append(command) or run(command, text))

    assert native.load(torch.float16) is not None
    assert made == made_in(fresh)
    assert ["--version"] == [command[-1] for command in asked]


@pytest.mark.parametrize("size", [0, 9000])
def test_half_a_library_is_made_again(size: int, fresh: Path) -> None:
    """A write that was lost: to run it would be a crash."""
    assert native.load(torch.float16) is not None
    made = made_in(fresh)
    (library,) = (fresh / "native").glob("*.so")
    half = library.read_bytes()[:size]
    library.unlink()  # another file, since this process has mapped the old one
    library.write_bytes(half)

    load_elsewhere()
    assert made.keys() == made_in(fresh).keys()
    assert size < library.stat().st_size


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("+ pass->positions[r]) * dim, x, dim", "+ (r ? pass->positions[r] - 1 : 0)) * dim, x, dim"),
        (".sees = pass->positions[t] + 1,", ".sees = pass->positions[t],"),
        ("low * cos[j] + high * sin[j]", "low * cos[j] - high * sin[j]"),
    ],
    ids=["another cell", "its own cell unseen", "turned the other way"],
)
def test_the_trial_notices_wrong_layers(
    right: str, wrong: str, fresh: Path, checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seeded mistakes, and a compiler that makes them: refused at start instead of answering wrongly."""
    load_from = native._load_from

    def mistaken(folder: Path, made_from: str, command: list[str], source: str) -> Any:
        assert 1 == source.count(right)
        return load_from(folder, made_from, command, source.replace(right, wrong))

    monkeypatch.setattr(native, "_load_from", mistaken)

    refuse(checkpoint("llama"), "model", "can be cut back")


@pytest.mark.parametrize("damage", ["a file", "not there", "writable by others", "of another user"])
def test_a_cache_that_is_of_no_use(damage: str, fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is compiled for this process alone. What others could put there is not run."""
    folder = fresh / "native"
    if damage == "a file":
        folder.write_text("")
    elif damage == "not there":
        monkeypatch.setenv("SPECWIRE_CACHE", "/proc/nowhere")
    elif damage == "writable by others":
        folder.mkdir()
        folder.chmod(0o777)
    else:
        folder.mkdir()
        monkeypatch.setattr(native.os, "geteuid", lambda: folder.stat().st_uid + 1)

    assert native.load(torch.float16) is not None
    assert not (folder.is_dir() and list(folder.iterdir()))


def test_the_next_compiler_is_tried(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script(fresh / "cc", "exit 1")
    monkeypatch.setenv("PATH", f"{fresh}:{native.os.environ['PATH']}")

    assert native.load(torch.float16) is not None


@pytest.mark.parametrize(
    ("compiler", "said"),
    [
        (None, "no C compiler"),
        ("exit", "the disk is on fire"),
        (
            'for each; do [ "$last" = -o ] && echo nothing > "$each"; last=$each; done',
            "invalid ELF header|file too short",
        ),
        ("true", "No such file"),
        ("gcc 'unclosed", "No closing quotation"),
        ("no-such-compiler", "CC=no-such-compiler is no command"),
    ],
    ids=["none", "fails", "makes rubbish", "makes nothing", "not a command line", "not there"],
)
def test_without_a_compiler_all_works_and_it_is_said_once(
    compiler: str | None,
    said: str,
    fresh: Path,
    checkpoint: Callable[[str], Path],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    load: Load,
) -> None:
    if compiler is None:
        monkeypatch.setenv("PATH", str(fresh))
    elif compiler == "exit":
        monkeypatch.setenv("CC", script(fresh / "compiler", "printf 'the disk\\377 is on fire' >&2; exit 1"))
    elif "-compiler" in compiler or "unclosed" in compiler:
        monkeypatch.setenv("CC", compiler)
    else:
        monkeypatch.setenv("CC", script(fresh / "compiler", f'[ "$1" = --version ] && exit 0; {compiler}'))
    settings: dict[str, Any] = {"precision": "float16", "max_sessions": 4}
    with caplog.at_level(logging.WARNING):
        models = [load_torch_model(ModelConfig(model=str(checkpoint("llama")), **settings)) for _ in range(2)]

    (record,) = caplog.records
    assert re.search(said, record.getMessage().replace("\ufffd", ""))
    for model in models:
        assert not model.compiled
        assert isinstance(model._body, FusedBody)
        assert isinstance(model._head, FbgemmLinear)
    feeds = [Feed(0, 0, text(20), 20)]
    expected = load("llama", compiled=True, precision="float16").forward(feeds)
    torch.testing.assert_close(models[0].forward(feeds), expected, rtol=1e-4, atol=1e-4)


def test_what_does_not_compile_is_tried_once(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With each set of instructions: another folder would not help, and a compiler may take its time to fail."""
    told = fresh / "told"
    compiler = script(fresh / "compiler", f'[ "$1" = --version ] && exit 0; echo >> {told}; exit 1')
    monkeypatch.setenv("CC", compiler)

    assert native.load(torch.float16) is None
    assert len(native._instructions(torch.float16)) == len(told.read_text())


def test_strict_without_a_compiler(
    fresh: Path, checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Costs time there, and holds: token by token or in blocks, bit for bit."""
    monkeypatch.setenv("PATH", str(fresh))
    config = ModelConfig(
        model=str(checkpoint("llama")), precision="float16", exactness="strict", max_block=4, max_sessions=2
    )
    model, tokens = load_torch_model(config), text(13)
    expected = one_by_one(model, tokens)

    blocks = [model.forward([Feed(1, at, tokens[at : at + 5], len(tokens[at : at + 5]))]).clone() for at in (0, 5, 10)]

    assert torch.equal(torch.cat(blocks), expected)


@pytest.mark.parametrize(
    ("system", "machine", "capability"),
    [("Darwin", "x86_64", "AVX2"), ("Linux", "aarch64", "DEFAULT"), ("Linux", "x86_64", "DEFAULT")],
)
def test_other_machines_are_not_even_asked(
    system: str, machine: str, capability: str, fresh: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native.platform, "system", lambda: system)
    monkeypatch.setattr(native.platform, "machine", lambda: machine)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)

    assert native.load(torch.float16) is None
    assert [] == list(fresh.iterdir())
