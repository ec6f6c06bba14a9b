"""The port over a Hugging Face model with full attention: ragged batches, cut-back by position, scores of wanted rows only.

Law. Scores depend on the tokens of a row's own slot up to its position, and (by rounding alone) on the shape of the pass;
with `strict`, or compiled layers, on nothing but the former. Columns that are no token of the tokenizer never leave.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers import PreTrainedModel

from specwire.lm import compat
from specwire.lm.feeds import Pass, SlotLengths, as_pass, pack, plan, plan_fixed
from specwire.lm.fused import FusedBody, compiled_library, fuse
from specwire.lm.kv_slots import KVSlots, attend
from specwire.lm.linear import linear_maker, prepare_linears
from specwire.lm.native_layers import NativeModel
from specwire.lm.port import Feed, ModelSpec
from specwire.lm.static_steps import StaticSteps

# What a pass costs besides its tokens, in tokens: (time of one token) / (time of one more), see linear.py for two cores.
_OVERHEAD = {("cpu", "float32"): 32, ("cpu", "bfloat16"): 4, ("cpu", "float16"): 14, ("cpu", "int8"): 14}
_OVERHEAD_GPU = 256
_ATTENTION_CALL = {"cpu": 10, "cuda": 256}
"""What a call of attention costs besides its queries, in queries. Measured over all layers of a 135M model on two cores; on a GPU
a launch is worth hundreds."""


class TorchModel:
    """A `LanguageModel` whose forward is transformers' own, with our cache and our attention over it."""

    def __init__(
        self,
        model: PreTrainedModel,
        spec: ModelSpec,
        num_slots: int,
        strict_width: int | None = None,
        reload: Callable[[], PreTrainedModel] | None = None,
        *,
        fused: bool = True,
        recorded_width: int = 0,
    ) -> None:
        """`strict_width`: tokens per row of every pass under `strict`; None: shapes as they come.
        `reload`: gives the same weights again, for `score_sequence`. `fused`: see fused.py; False: transformers' own layers.
        `recorded_width`: tokens of the longest row of a step that a GPU repeats from a recording; 0: none is (static_steps.py)."""
        self.spec = spec
        self._device = torch.device(spec.device)
        self._num_slots = num_slots
        self._strict_width = strict_width
        self._reload = reload
        self._exact: PreTrainedModel | None = None
        self._lengths = SlotLengths(num_slots, spec.max_context, spec.vocab_size)
        self._columns = len(spec.columns) if spec.columns is not None else spec.vocab_size
        self._overhead = _OVERHEAD.get((self._device.type, spec.precision), _OVERHEAD_GPU)
        holes = [token for token, spelled in enumerate(spec.vocabulary) if not spelled] if spec.columns is None else []
        self._holes = torch.tensor(holes, device=self._device) if holes else None
        model.to(self._device)
        stored = getattr(torch, spec.precision)
        # what computes in another precision stays as it is: see torch_load
        library = compiled_library(model, stored) if fused and model.dtype is torch.float32 else None
        self.arithmetic = library.arithmetic if library is not None else ""
        """Of compiled layers: see native.py."""
        if self.compiled:
            self._strict_width = strict_width = None
        strict = strict_width is not None
        make = linear_maker(model.dtype, self._device, stored, aligned=strict, library=library)
        _trim_head(model, self._columns)
        if fused:
            fuse(model, make, spec.max_context, strict)
        prepare_linears(model, make)
        compat.use_attention(model, "specwire_slots", attend)
        self._head = model.get_output_embeddings()
        self._head.register_forward_pre_hook(self._keep_wanted)
        self._model = model
        self._body = getattr(model, model.base_model_prefix)
        self._cache_argument = compat.cache_argument(model)
        self._kv = KVSlots(num_slots, spec.max_context, self._device)
        self._native: NativeModel | None = None
        if library is not None:
            assert len(self._body.embed_tokens.weight) >= spec.vocab_size
            self._native = self._body.compiled(library, self._head, self._kv)
        self._static: StaticSteps | None = None
        if recorded_width and not strict and self._device.type == "cuda" and isinstance(self._body, FusedBody):
            self._static = StaticSteps(self._body, self._kv, recorded_width)
            with torch.no_grad():
                self._static.record()

    def __repr__(self) -> str:
        layers = "compiled" if self.compiled else type(self._body).__name__
        facts = f"{self.spec.name} {self.spec.precision} {self.spec.device} {layers}"
        return f"TorchModel({facts} {self._kv!r} {self._lengths!r})"

    @property
    def compiled(self) -> bool:
        """Whether its layers are compiled (native.py). Then no row depends on others, whatever the shape of a pass."""
        return bool(self.arithmetic)

    @property
    def num_slots(self) -> int:
        return self._num_slots

    @property
    def capacity(self) -> int:
        return self.spec.max_context

    def copy(self, source: int, target: int, length: int) -> None:
        self._lengths.copy(source, target, length)
        with torch.no_grad():
            self._kv.copy(source, target, length)

    def cut(self, slot: int, length: int) -> None:
        self._lengths.cut(slot, length)
        if not self.compiled:  # those look at no cell behind a token's own
            with torch.no_grad():
                self._kv.wipe(slot, length)

    def synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def forward(self, feeds: Sequence[Feed]) -> torch.Tensor:
        self._lengths.check(feeds)
        self._lengths.begin(feeds)
        if self._native is not None:
            scores = self._tokens_only(self._native(feeds))
            self._lengths.end(feeds)
            return scores
        if self._static is not None:
            with torch.no_grad():
                states = self._static.states(feeds)
                if states is not None:
                    scores = self._tokens_only(self._head(states))
                    self._lengths.end(feeds)
                    return scores
        passes = self._passes(feeds)
        num_rows = sum(feed.rows for feed in feeds)
        with torch.no_grad(), self._kv:
            if len(passes) == 1 and num_rows:
                scores = self._pass(passes[0])
            else:
                scores = torch.empty(num_rows, self._columns, device=self._device)
                for each in passes:
                    part = self._pass(each)
                    if len(each.wanted):
                        scores[torch.from_numpy(each.results).to(self._device)] = part
        self._lengths.end(feeds)
        return scores

    def _passes(self, feeds: Sequence[Feed]) -> list[Pass]:
        """In the order in which they must run."""
        if self._strict_width is not None:
            rectangles = plan_fixed(feeds, self.capacity, self._num_slots, self._strict_width)
        elif isinstance(self._body, FusedBody):
            return [pack(feeds, _ATTENTION_CALL[self._device.type])]
        else:
            rectangles = plan(feeds, self.capacity, self._overhead)
        return [as_pass(rectangle, self.capacity) for rectangle in rectangles]

    def _pass(self, forward: Pass) -> torch.Tensor:  # -> [wanted, columns] float32
        tokens, positions = self._kv.begin(forward)
        if not len(forward.wanted):
            self._states(tokens, positions, forward.rows)
            return torch.empty(0, self._columns, device=self._device)
        scores = self._scores(tokens, positions, forward.rows)
        if forward.fixed:
            scores = scores.index_select(0, self._kv.wanted)
        return self._tokens_only(scores)

    def _tokens_only(self, scores: torch.Tensor) -> torch.Tensor:
        """Scores as they leave: float32, of tokens alone."""
        if scores.shape[1] > self._columns:
            scores = scores[:, : self._columns]
        scores = scores.float()
        if self._holes is not None:
            scores.index_fill_(1, self._holes, float("-inf"))
        return scores

    def _states(self, tokens: torch.Tensor, positions: torch.Tensor, rows: int) -> Any:
        """The layers alone."""
        if isinstance(self._body, FusedBody):
            return self._body(tokens, positions, self._kv)
        return self._body(**self._arguments(tokens, positions, rows))

    def _scores(self, tokens: torch.Tensor, positions: torch.Tensor, rows: int) -> torch.Tensor:
        """Layers and head. The head meets wanted rows only, see `_keep_wanted`."""
        if isinstance(self._body, FusedBody):
            scores: torch.Tensor = self._head(self._body(tokens, positions, self._kv))
        else:
            scores = self._model(**self._arguments(tokens, positions, rows)).logits
        return scores

    def _arguments(self, tokens: torch.Tensor, positions: torch.Tensor, rows: int) -> dict[str, Any]:
        return {
            "input_ids": tokens.view(rows, -1),
            "position_ids": positions.view(rows, -1),
            self._cache_argument: self._kv,
            "use_cache": True,
        }

    def _keep_wanted(self, _: torch.nn.Module, arguments: tuple[torch.Tensor]) -> tuple[torch.Tensor] | None:
        """Runs before the head: [..., hidden] -> [wanted, hidden], so that only wanted rows meet the vocabulary."""
        hidden = arguments[0]
        hidden = hidden.reshape(-1, hidden.shape[-1])
        # under `strict` the head sees every row, as its shape must not depend on how many are wanted
        return (hidden if self._strict_width is not None else hidden.index_select(0, self._kv.wanted),)

    def clear(self) -> None:
        """Every slot is empty."""
        self._lengths.clear()

    def score_sequence(self, tokens: Sequence[int], dtype: torch.dtype = torch.float64) -> torch.Tensor:
        """The same weights over a whole sequence at once, without our cache: [tokens, columns] in `dtype`.

        Row r scores the token at position r + 1. For tests and tools; the second copy of the model is kept. Architectures
        that compute their norms or rotations in float32 whatever the dtype leave an error of about 1e-6 of the scores."""
        if self._exact is None or self._exact.dtype != dtype:
            if self._reload is None:
                raise RuntimeError("this model was built without `reload`")
            self._exact = self._reload().to(self._device, dtype)
        with torch.no_grad():
            ids = torch.tensor([list(tokens)], device=self._device)
            scores: torch.Tensor = self._exact(input_ids=ids, use_cache=False).logits[0, :, : self._columns].to(dtype)
            if self._holes is not None:
                scores.index_fill_(1, self._holes, float("-inf"))
        return scores


def _trim_head(model: PreTrainedModel, columns: int) -> None:
    """Rows of the head past the vocabulary are padding: cut off before they are computed. Memory stays shared with a tied table,
    unless the layers are compiled: those keep their weights in an order of their own."""
    head = model.get_output_embeddings()
    if isinstance(head, torch.nn.Linear) and head.out_features > columns:
        short = torch.nn.Linear(head.in_features, columns, bias=head.bias is not None, device="meta")
        short.weight = torch.nn.Parameter(head.weight[:columns], requires_grad=False)
        if head.bias is not None:
            short.bias = torch.nn.Parameter(head.bias[:columns], requires_grad=False)
        model.set_output_embeddings(short)
