"""The body of Llama and its relatives with little between its matrix products. Any other architecture stays as it is.

transformers' own layer makes some sixty small tensor operations and as many Python calls; on two cores they take as long as
the products of a 135M model. Here q, k and v are one product, gate and up another, rotation is three operations for queries
and keys together, and nothing is transposed when a row has one token. Rows of any lengths are one pass, without padding. On
CPUs all of it is one call (native.py); what follows here is for where that cannot be had.

Law. Same function as the layers it replaces, up to rounding; held to it by tests and by the trial at every loading. Which layers
it may replace is decided by their exact classes: a subclass may mean something else.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import PreTrainedModel
from transformers.models.llama import modeling_llama
from transformers.models.mistral import modeling_mistral
from transformers.models.qwen2 import modeling_qwen2
from transformers.models.qwen3 import modeling_qwen3

from specwire.lm import native
from specwire.lm.kv_slots import KVSlots
from specwire.lm.linear import GatedMLP, Maker, is_silu, make_linear
from specwire.lm.native_layers import Ends, Heads, LayerParts, NativeLinear, NativeModel

_BODIES = {
    modeling_llama.LlamaModel: (modeling_llama.LlamaDecoderLayer, modeling_llama.LlamaRMSNorm),
    modeling_mistral.MistralModel: (modeling_mistral.MistralDecoderLayer, modeling_mistral.MistralRMSNorm),
    modeling_qwen2.Qwen2Model: (modeling_qwen2.Qwen2DecoderLayer, modeling_qwen2.Qwen2RMSNorm),
    modeling_qwen3.Qwen3Model: (modeling_qwen3.Qwen3DecoderLayer, modeling_qwen3.Qwen3RMSNorm),
}


class _Norm:
    """x / sqrt(mean(x^2) + eps) * weight (RMSNorm, arXiv:1910.07467)."""

    def __init__(self, weight: torch.Tensor, eps: float, strict: bool) -> None:
        """`strict`: a row's result does not depend on its place, to the last bit."""
        self.weight, self.eps, self._strict = weight, eps, strict
        size = weight.numel()
        # sqrt(mean(x^2) + eps) = hypot(|x|, sqrt(size * eps)) / sqrt(size): few and small operations, a third of rms_norm's time
        self._scaled = (
            weight * math.sqrt(size) if weight.dtype is torch.float32 and weight.device.type == "cpu" else None
        )
        self._least = size * eps
        self._least_root = torch.tensor(math.sqrt(self._least))

    def __call__(self, states: torch.Tensor) -> torch.Tensor:
        if self._scaled is None:
            return F.rms_norm(states, self.weight.shape, self.weight, self.eps)
        norms = torch.linalg.vector_norm(states, dim=-1, keepdim=True)
        # hypot rounds otherwise in rows that fill no whole vector of the CPU; these three round alike everywhere
        lengths = norms.square_().add_(self._least).sqrt_() if self._strict else norms.hypot_(self._least_root)
        return torch.div(states, lengths).mul_(self._scaled)


class _Layer(nn.Module):
    """One decoder layer over [tokens, hidden]."""

    def __init__(self, make: Maker | None, layer: Any, strict: bool) -> None:
        super().__init__()
        attention = layer.self_attn
        self.index: int = attention.layer_idx
        self.scaling: float = attention.scaling
        self.head_dim: int = attention.head_dim
        self.heads: int = attention.q_proj.out_features // self.head_dim
        self.kv_heads: int = attention.k_proj.out_features // self.head_dim
        self.qkv = make_linear(make, attention.q_proj, attention.k_proj, attention.v_proj)
        self.out = make_linear(make, attention.o_proj)
        self.mlp = GatedMLP(make, layer.mlp.gate_proj, layer.mlp.up_proj, layer.mlp.down_proj)
        self.before_attention = _norm(layer.input_layernorm, strict)
        self.before_mlp = _norm(layer.post_attention_layernorm, strict)
        self.query_norm = _norm(attention.q_norm, strict) if hasattr(attention, "q_norm") else None
        self.key_norm = _norm(attention.k_norm, strict) if hasattr(attention, "k_norm") else None

    def forward(self, states: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, kv: KVSlots) -> torch.Tensor:
        """`states` [tokens, hidden]; `cos`, `sin` [tokens, 1, head_dim], the first half of `sin` negated."""
        mixed = self.qkv(self.before_attention(states)).view(len(states), -1, self.head_dim)
        both = mixed.narrow(1, 0, self.heads + self.kv_heads)
        turned = both
        if self.query_norm is not None and self.key_norm is not None:
            queries, keys = both.narrow(1, 0, self.heads), both.narrow(1, self.heads, self.kv_heads)
            turned = torch.cat((self.query_norm(queries), self.key_norm(keys)), 1)
        torch.addcmul(turned * cos, turned.roll(self.head_dim // 2, -1), sin, out=both)
        stored = kv.write_both(self.index, mixed.narrow(1, self.heads, 2 * self.kv_heads))
        states = states + self.out(kv.attend(mixed.narrow(1, 0, self.heads), *stored, self.scaling))
        output: torch.Tensor = states + self.mlp(self.before_mlp(states))
        return output


class FusedBody(nn.Module):
    """Stands in for `LlamaModel` and its like: tokens to hidden states, through our cache."""

    def __init__(self, make: Maker | None, body: Any, capacity: int, strict: bool) -> None:
        super().__init__()
        self.embed_tokens = body.embed_tokens
        # One table serves every pass: kinds that change with the length of the text are refused (`hf_model.check_supported`).
        like = self.embed_tokens.weight
        cos, sin = body.rotary_emb(like, position_ids=torch.arange(capacity, device=like.device)[None])
        half = sin.shape[-1] // 2
        self._cos = cos.reshape(capacity, 1, -1)
        self._sin = torch.cat((-sin[..., :half], sin[..., half:]), -1).reshape(capacity, 1, -1)
        self.layers = nn.ModuleList()
        for index, layer in enumerate(body.layers):
            self.layers.append(_Layer(make, layer, strict))
            body.layers[index] = nn.Identity()  # its weights go now, so that memory holds one layer twice, not all
        self.norm = _norm(body.norm, strict)

    def compiled(self, library: native.Library, head: NativeLinear, kv: KVSlots) -> NativeModel:
        """The whole model as one call; its linear layers are compiled. `head`: hidden states to scores."""
        layers: list[Any] = list(self.layers)
        parts = [
            LayerParts(
                layer.qkv,
                layer.out,
                layer.mlp.gate_up,
                layer.mlp.down,
                layer.before_attention.weight,
                layer.before_mlp.weight,
                layer.query_norm.weight if layer.query_norm is not None else None,
                layer.key_norm.weight if layer.key_norm is not None else None,
            )
            for layer in layers
        ]
        first = layers[0]
        heads = Heads(first.heads, first.kv_heads, first.head_dim, first.scaling)
        ends = Ends(self.embed_tokens.weight.detach(), self.norm.weight, self.norm.eps, self._cos, self._sin)
        return NativeModel(library, ends, parts, heads, head, kv)

    def forward(self, tokens: torch.Tensor, positions: torch.Tensor, kv: KVSlots) -> torch.Tensor:
        """[tokens] each -> [tokens, hidden]."""
        states = self.embed_tokens(tokens)
        cos, sin = self._cos.index_select(0, positions), self._sin.index_select(0, positions)
        for layer in self.layers:
            states = layer(states, cos, sin, kv)
        result: torch.Tensor = self.norm(states)
        return result


def compiled_library(model: PreTrainedModel, stored: torch.dtype) -> native.Library | None:
    """What runs this model's steps as one call, with weights that are kept so; None: it is of another architecture, of sizes that
    do not fit, not on a CPU, or the library cannot be had."""
    body = getattr(model, model.base_model_prefix)
    if model.device.type != "cpu" or stored not in native.KEPT or not _is_known(body):
        return None
    if type(model.get_output_embeddings()) is not nn.Linear or type(body.embed_tokens) is not nn.Embedding:
        return None
    first = body.layers[0]
    sizes = first.self_attn.head_dim, first.mlp.down_proj.in_features, first.mlp.down_proj.out_features
    return native.load(stored) if all(size % native.LANES == 0 for size in sizes) else None


def fuse(model: PreTrainedModel, make: Maker | None, capacity: int, strict: bool) -> None:
    """Replaces the model's body by a `FusedBody` where its architecture is known; takes its weights over. `make`: see
    `linear_maker`. `capacity`: positions there will ever be. `strict`: no row's result may depend on others."""
    body = getattr(model, model.base_model_prefix)
    if _is_known(body):
        with torch.inference_mode():
            setattr(model, model.base_model_prefix, FusedBody(make, body, capacity, strict))


def _is_known(body: Any) -> bool:
    classes = _BODIES.get(type(body))
    if classes is None:
        return False
    layer_class, norm_class = classes
    return type(body.norm) is norm_class and all(
        type(layer) is layer_class and _is_plain(layer, norm_class) for layer in body.layers
    )


def _is_plain(layer: Any, norm_class: type[nn.Module]) -> bool:
    """No part was exchanged, as adapters and quantizers do."""
    attention, mlp = layer.self_attn, layer.mlp
    together = ((attention.q_proj, attention.k_proj, attention.v_proj), (mlp.gate_proj, mlp.up_proj))
    norms = [layer.input_layernorm, layer.post_attention_layernorm]
    norms += [getattr(attention, name) for name in ("q_norm", "k_norm") if hasattr(attention, name)]
    return (
        all(type(each) is nn.Linear for each in (*together[0], attention.o_proj, *together[1], mlp.down_proj))
        and all(len({each.bias is None for each in group}) == 1 for group in together)
        and all(type(norm) is norm_class for norm in norms)
        and is_silu(mlp.act_fn)
    )


def _norm(module: Any, strict: bool) -> _Norm:
    return _Norm(module.weight.detach(), module.variance_epsilon, strict)
