"""How long steps take on a device, of random models of several sizes, in three ways.

transformers' own layers; ours, kernel by kernel; and ours in fixed shapes, which a GPU repeats from recordings.

    python -m specwire.lm.measure_steps                       # a GPU; under eight minutes
    python -m specwire.lm.measure_steps --device cpu --sizes tiny

All three compute the same function of the same weights, which is checked before anything is timed: every row's scores against
transformers' own, in float32 too where the model is small. Needs torch and transformers; no hub, no Ray, no telemetry.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import transformers

from specwire.law.errors import InvalidArgument
from specwire.law.values import GREEDY
from specwire.lm import compat
from specwire.lm.port import Feed, ModelSpec
from specwire.lm.static_steps import StaticSteps
from specwire.lm.torch_lm import TorchModel

SIZES: dict[str, dict[str, int]] = {
    "tiny": {"hidden": 64, "inner": 128, "layers": 2, "heads": 4, "kv_heads": 2, "vocab": 211},
    "135M": {"hidden": 576, "inner": 1536, "layers": 30, "heads": 9, "kv_heads": 3, "vocab": 49152},
    "1B": {"hidden": 2048, "inner": 8192, "layers": 16, "heads": 32, "kv_heads": 8, "vocab": 128256},
    "3B": {"hidden": 3072, "inner": 8192, "layers": 28, "heads": 24, "kv_heads": 8, "vocab": 128256},
    "8B": {"hidden": 4096, "inner": 14336, "layers": 32, "heads": 32, "kv_heads": 8, "vocab": 128256},
}
OWN, KERNELS, RECORDED = "transformers", "our layers", "fixed shapes"
ROWS = (1, 5, 9)
WIDEST = max(ROWS)
EXACT_UP_TO = 2e9
"""Parameters of the largest model that is checked in float32 as well."""
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.03}
"""Root mean square difference of scores, as a share of their spread."""


@dataclass(frozen=True, slots=True)
class Timing:
    """One line of the result."""

    size: str
    layers: str
    sessions: int
    rows: int
    """Of each session."""
    milliseconds: float
    """Median of a step."""
    spread: float
    """Half of the steps lie within so many milliseconds of each other."""


class Bench:
    """One device, and the time that is left."""

    def __init__(
        self, device: torch.device, dtype: torch.dtype, context: int, sessions: Sequence[int], repeats: int
    ) -> None:
        self.device, self.dtype, self.context, self.sessions, self.repeats = device, dtype, context, sessions, repeats

    def compare(self, size: str, dtype: torch.dtype) -> dict[str, float]:
        """How far our scores are from transformers' own, as shares of their spread. Raises ArithmeticError if too far."""
        found: dict[str, torch.Tensor] = {}
        for layers in (OWN, KERNELS, RECORDED):
            run = self._runner(size, layers, dtype, sessions=2)
            # the block is refused once and written anew: what was cut back must not be seen
            run([[5] * WIDEST, [6] * WIDEST])
            found[layers] = run([_tokens(WIDEST, 1), _tokens(WIDEST, 2)]).clone()
            _forget(run)
            del run
            self._free()
        spread = found[OWN].std().item()
        shares = {}
        for layers in (KERNELS, RECORDED):
            shares[layers] = (found[layers] - found[OWN]).square().mean().sqrt().item() / spread
            if not shares[layers] <= TOLERANCE[dtype]:
                raise ArithmeticError(
                    f"{size}, {layers}, {dtype}: scores differ by {shares[layers]:.3g} of their spread"
                )
        return shares

    def time(self, size: str, layers: str) -> list[Timing]:
        """Steps of one model."""
        found = []
        for sessions in self.sessions:
            run = self._runner(size, layers, self.dtype, sessions)
            for rows in ROWS:
                feeds = [_tokens(rows, session) for session in range(sessions)]
                for _ in range(3):
                    run(feeds)
                taken = []
                for _ in range(self.repeats):
                    self._wait()
                    begun = time.perf_counter()
                    run(feeds)
                    self._wait()
                    taken.append((time.perf_counter() - begun) * 1e3)
                low, middle, high = statistics.quantiles(taken, n=4)
                found.append(Timing(size, layers, sessions, rows, round(middle, 3), round(high - low, 3)))
            _forget(run)
            del run
            self._free()
        return found

    def _runner(
        self, size: str, layers: str, dtype: torch.dtype, sessions: int
    ) -> Callable[[Sequence[Sequence[int]]], torch.Tensor]:
        """Blocks of all sessions to scores, [sum of rows, vocabulary], after `context` tokens that are cached."""
        model = _random_model(size, self.device, dtype, self.context + WIDEST)
        prompts = [_tokens(self.context, session) for session in range(sessions)]
        if layers == OWN:
            return _Own(model, prompts)
        return _Ours(model, prompts, dtype, self.context + WIDEST, recorded=layers == RECORDED)

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _free(self) -> None:
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()


class _Own:
    """transformers' own layers and cache; sessions are rows of a batch."""

    def __init__(self, model: Any, prompts: Sequence[Sequence[int]]) -> None:
        self._model = model
        self._cache = transformers.DynamicCache()
        self._argument = compat.cache_argument(model)
        self._step(prompts)

    def __call__(self, blocks: Sequence[Sequence[int]]) -> torch.Tensor:
        scores = self._step(blocks)
        self._cache.crop(-len(blocks[0]))
        return scores.flatten(0, 1).float()

    def _step(self, tokens: Sequence[Sequence[int]]) -> torch.Tensor:
        ids = torch.tensor([list(each) for each in tokens], device=self._model.device)
        with torch.no_grad():
            scores: torch.Tensor = self._model(
                input_ids=ids, use_cache=True, logits_to_keep=min(ids.shape[1], WIDEST), **{self._argument: self._cache}
            ).logits
        return scores


class _Ours:
    """A model behind the port."""

    def __init__(
        self, model: Any, prompts: Sequence[Sequence[int]], dtype: torch.dtype, capacity: int, *, recorded: bool
    ) -> None:
        device = model.device
        spec = ModelSpec(
            name="random",
            architecture=type(model).__name__,
            vocab_size=model.config.vocab_size,
            vocabulary=(),
            max_context=capacity,
            eos_token_ids=(),
            default_sampling=GREEDY,
            device=str(device),
            precision=str(dtype).removeprefix("torch."),
            fingerprint="",
        )
        self._model = TorchModel(model, spec, len(prompts), recorded_width=WIDEST if recorded else 0)
        if recorded and device.type != "cuda":  # the same code without a recording
            self._model._native = None
            self._model._static = StaticSteps(self._model._body, self._model._kv, WIDEST)
            with torch.no_grad():
                self._model._static.record()
        self._context = len(prompts[0])
        self._model.forward([Feed(slot, 0, tokens, 0) for slot, tokens in enumerate(prompts)])

    def __call__(self, blocks: Sequence[Sequence[int]]) -> torch.Tensor:
        feeds = [Feed(slot, self._context, tokens, len(tokens)) for slot, tokens in enumerate(blocks)]
        return self._model.forward(feeds)


def _random_model(size: str, device: torch.device, dtype: torch.dtype, capacity: int) -> Any:
    """The same weights at every call."""
    found = SIZES[size]
    config = transformers.LlamaConfig(
        hidden_size=found["hidden"],
        intermediate_size=found["inner"],
        num_hidden_layers=found["layers"],
        num_attention_heads=found["heads"],
        num_key_value_heads=found["kv_heads"],
        vocab_size=found["vocab"],
        max_position_embeddings=capacity,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    torch.manual_seed(1)
    with torch.device(device):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
    # so that a layer adds about what it is given, and no two rows are alike
    for name, values in model.named_parameters():
        if values.ndim > 1:
            values.data.normal_(std=1.0 if "embed" in name else values.shape[1] ** -0.5)
    return model.eval().requires_grad_(False)


def _tokens(count: int, salt: int) -> list[int]:
    return [(7 * index + 11 * salt + 3) % 200 for index in range(count)]


def _forget(run: Any) -> None:
    """Its memory, whoever still knows it."""
    vars(run).clear()


def _weight_bytes(size: str, dtype: torch.dtype) -> int:
    found = SIZES[size]
    head_dim = found["hidden"] // found["heads"]
    attention = found["hidden"] * (2 * found["hidden"] + 2 * found["kv_heads"] * head_dim)
    layer = attention + 3 * found["hidden"] * found["inner"]
    return (found["layers"] * layer + 2 * found["vocab"] * found["hidden"]) * dtype.itemsize


def main(arguments: Sequence[str]) -> int:
    """Exit status: 2 for what was asked wrongly, 1 where scores differ."""
    parser = argparse.ArgumentParser(
        "python -m specwire.lm.measure_steps", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--device", default="cuda", help="cuda, cuda:N or cpu")
    parser.add_argument("--sizes", default="135M,1B,3B,8B", help=f"of {','.join(SIZES)}")
    parser.add_argument("--context", type=int, default=512, help="cached tokens")
    parser.add_argument("--sessions", default="1,8", help="sessions of a step")
    parser.add_argument("--repeats", type=int, default=30, help="steps of each kind")
    parser.add_argument("--limit", type=float, default=450.0, help="seconds after which no further size is begun")
    parser.add_argument("--json", help="file for the numbers")
    asked = parser.parse_args(arguments)
    try:
        device, sizes, sessions = _checked(asked)
    except InvalidArgument as error:
        print(error, file=sys.stderr)
        return 2
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    bench = Bench(device, dtype, asked.context, sessions, asked.repeats)
    begun, timings, shares = time.monotonic(), list[Timing](), dict[str, dict[str, float]]()
    longest = 0.0
    for size in sizes:
        spent = time.monotonic() - begun
        if spent + 2 * longest > asked.limit:
            print(f"{size}: left out, {spent:.0f} of {asked.limit:.0f} seconds are spent", flush=True)
            continue
        free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else None
        if free is not None and 2.5 * _weight_bytes(size, dtype) > free:
            print(f"{size}: left out, its weights take more than two fifths of {free / 1e9:.0f} GB", flush=True)
            continue
        try:
            for exact in dict.fromkeys((dtype, torch.float32)):
                if exact is dtype or _weight_bytes(size, exact) / 4 <= EXACT_UP_TO:
                    name = str(exact).removeprefix("torch.")
                    shares[f"{size} {name}"] = found = bench.compare(size, exact)
                    said = ", ".join(f"{layers} {share:.1e}" for layers, share in found.items())
                    print(f"{size} {name}: scores differ from transformers' by (of their spread) {said}", flush=True)
            for layers in (OWN, KERNELS, RECORDED):
                timings += bench.time(size, layers)
        except ArithmeticError as error:
            print(error, file=sys.stderr)
            return 1
        _show([each for each in timings if each.size == size])
        longest = max(longest, time.monotonic() - begun - spent)
    if asked.json:
        with open(asked.json, "w", encoding="utf-8") as file:
            json.dump(
                {
                    "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
                    "torch": torch.__version__,
                    "transformers": transformers.__version__,
                    "seconds": round(time.monotonic() - begun, 1),
                    "differences": shares,
                    "timings": [{name: getattr(each, name) for name in Timing.__slots__} for each in timings],
                },
                file,
                indent=1,
            )
    return 0


def _checked(asked: Any) -> tuple[torch.device, list[str], list[int]]:
    """Raises InvalidArgument, which names the option."""
    try:
        device = torch.device(asked.device)
    except RuntimeError:
        raise InvalidArgument("--device", asked.device, "cuda, cuda:N or cpu") from None
    count = torch.cuda.device_count() if device.type == "cuda" else 1
    if device.type not in ("cuda", "cpu") or (device.index or 0) >= count:
        raise InvalidArgument("--device", asked.device, f"cpu or one of the {count} CUDA devices here")
    sizes = asked.sizes.split(",")
    for size in sizes:
        if size not in SIZES:
            raise InvalidArgument("--sizes", size, f"of {', '.join(SIZES)}")
    try:
        sessions = [int(each) for each in asked.sessions.split(",")]
    except ValueError:
        sessions = [0]
    if min(sessions) < 1 or max(sessions) > 256:
        raise InvalidArgument("--sessions", asked.sessions, "whole numbers from 1 to 256, with commas between them")
    for option, least, most in (("context", 1, 100_000), ("repeats", 2, 10_000)):
        value = getattr(asked, option)
        if not least <= value <= most:
            raise InvalidArgument(f"--{option}", value, f"from {least} to {most}")
    if not asked.limit > 0:
        raise InvalidArgument("--limit", asked.limit, "above 0")
    return device, sizes, sessions


def _show(timings: Sequence[Timing]) -> None:
    """Milliseconds, and how many times as fast as transformers' own."""
    own = {(each.sessions, each.rows): each.milliseconds for each in timings if each.layers == OWN}
    for each in timings:
        ratio = own[each.sessions, each.rows] / each.milliseconds
        print(
            f"{each.size:>5} {each.layers:<12} {each.sessions:>3} x {each.rows} rows "
            f"{each.milliseconds:>9.3f} ms (half within {each.spread:.3f})  {ratio:.2f}x",
            flush=True,
        )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
