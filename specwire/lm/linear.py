"""The hook for faster linear layers: whatever a device does better than `torch.nn.Linear` is put in here and nowhere else.

The products of a 135M model on two cores without AVX-512, milliseconds by rows (medians):

| | 1 | 4 | 8 | 16 | 24 |
| --- | --- | --- | --- | --- | --- |
| `torch.nn.Linear`, float32 | 61 | 150 | 158 | 121 | 139 |
| `PackedLinear`, float32 | 55 | 64 | 76 | 97 | 104 |
| `FbgemmLinear`, float16 weights | 27 | 33 | 42 | 60 | 75 |
| `NativeLinear`, float16 weights | 26 | 25 | 35 | 50 | 71 |

Few rows are read, not computed: half the bytes take half the time. Where layers are not compiled bfloat16 stays with torch, whose
kernels use the CPU's own instructions where it has any; where it has none a pass grows by a third of its first row with each
further one. A step of the same model on two cores with AMX, weights in bfloat16, by rows:

| | 1 | 3 | 5 | 9 | 33 | 400 of a prompt |
| --- | --- | --- | --- | --- | --- | --- |
| torch | 34 | 36 | 38 | 41 | 54 | 180 |
| `NativeLinear`, tiles | 12 | 12 | 13 | 16 | 35 | 190 |
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

from specwire.lm.native import Library
from specwire.lm.native_layers import NativeLinear

PACKED_FOR_ROWS = 8
"""Batch size the packing is tuned for. One value for every batch, so that every batch is computed by the same kernel."""
FBGEMM_ALIGNMENT = 6
"""FBGEMM computes six rows at a time. Its kernels for one and two rows add up in another order, so a row's result depends on
the number of rows only where that leaves a remainder."""

Maker = Callable[[torch.Tensor, torch.Tensor | None], nn.Module]
"""(weight [outputs, inputs], bias [outputs] or None) to a frozen layer."""


def can_pack() -> bool:
    """Whether this torch has the packed kernel. It is the one that torch.compile uses for frozen weights."""
    ops = getattr(torch.ops, "mkldnn", None)
    return (
        bool(torch._C._has_mkldnn)
        and ops is not None
        and hasattr(ops, "_reorder_linear_weight")
        and hasattr(ops, "_linear_pointwise")
    )


def can_halve() -> bool:
    """Whether this torch and this CPU multiply float16 weights in float32 (FBGEMM, which needs AVX2)."""
    return torch.backends.quantized.engine in ("x86", "fbgemm") and hasattr(torch.ops.quantized, "linear_prepack_fp16")


def linear_maker(
    dtype: torch.dtype, device: torch.device, stored: torch.dtype, aligned: bool, library: Library | None = None
) -> Maker | None:
    """How linear layers are made for a model of this dtype; None: `torch.nn.Linear` it is.

    `stored`: every weight is a number of this kind, so that storing it as one loses nothing. `aligned`: no row's result may
    depend on how many rows there are. `library`: of the model's compiled layers, where it has them (`fused.compiled_library`)."""
    if library is not None:
        return functools.partial(NativeLinear, library)
    if dtype is not torch.float32 or device.type != "cpu":
        return None
    if stored is torch.float16 and can_halve():
        return functools.partial(FbgemmLinear, aligned=aligned)
    return PackedLinear if can_pack() else None


class FbgemmLinear(nn.Module):
    """A frozen linear layer on the CPU, float16 weights and float32 arithmetic, [..., inputs] -> [..., outputs], where `native.py`
    cannot be had."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, *, aligned: bool) -> None:
        """`weight` [outputs, inputs] and `bias` [outputs], both float32; see `linear_maker`."""
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self._aligned = aligned
        self._packed = torch.ops.quantized.linear_prepack_fp16(weight.detach().contiguous(), bias)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """The product."""
        if self._aligned:
            flat = inputs.reshape(-1, self.in_features)
            rows = len(flat)
            flat = F.pad(flat, (0, 0, 0, -rows % FBGEMM_ALIGNMENT))
            padded: torch.Tensor = torch.ops.quantized.linear_dynamic_fp16(flat, self._packed)
            return padded[:rows].view(*inputs.shape[:-1], self.out_features)
        result: torch.Tensor = torch.ops.quantized.linear_dynamic_fp16(inputs, self._packed)
        return result


class PackedLinear(nn.Module):
    """A frozen float32 linear layer on the CPU, [..., inputs] -> [..., outputs]."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        """`weight` [outputs, inputs], `bias` [outputs]."""
        super().__init__()
        assert weight.dtype == torch.float32
        assert weight.device.type == "cpu"
        self.out_features, self.in_features = weight.shape
        self.bias = bias.detach() if bias is not None else None
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach().contiguous(), PACKED_FOR_ROWS)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """The product."""
        result: torch.Tensor = torch.ops.mkldnn._linear_pointwise(inputs, self._packed, self.bias, "none", [], "")
        return result


class GatedMLP(nn.Module):
    """down(silu(gate(x)) * up(x)) with gate and up as one product, as in Llama, Qwen and Mistral."""

    def __init__(self, make: Maker | None, gate: nn.Linear, up: nn.Linear, down: nn.Linear) -> None:
        super().__init__()
        self.gate_up = make_linear(make, gate, up)
        self.down = make_linear(make, down)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """The block's output, same shape as its input."""
        gate, up = self.gate_up(inputs).chunk(2, dim=-1)
        output: torch.Tensor = self.down(F.silu(gate).mul_(up))
        return output


def make_linear(make: Maker | None, *layers: nn.Linear) -> nn.Module:
    """One frozen layer whose output is those of `layers` side by side. All of them have a bias, or none."""
    weights, biases = zip(*((layer.weight.detach(), layer.bias) for layer in layers), strict=True)
    weight = weights[0] if len(layers) == 1 else torch.cat(weights)
    bias = None if biases[0] is None else torch.cat([bias.detach() for bias in biases])
    return (make or _torch_linear)(weight, bias)


def _torch_linear(weight: torch.Tensor, bias: torch.Tensor | None) -> nn.Module:
    joined = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
    joined.weight = nn.Parameter(weight, requires_grad=False)
    if bias is not None:
        joined.bias = nn.Parameter(bias, requires_grad=False)
    return joined


def prepare_linears(model: nn.Module, make: Maker | None) -> None:
    """Replaces linear layers of a loaded model, in place, by what `make` makes of them. Called once, at loading."""
    if make is None:
        return
    with torch.inference_mode():
        for parent in list(model.modules()):
            for name, child in list(parent.named_children()):
                if _is_gated_mlp(child):
                    setattr(parent, name, GatedMLP(make, child.gate_proj, child.up_proj, child.down_proj))  # type: ignore[arg-type]
                elif type(child) is nn.Linear:
                    setattr(parent, name, make_linear(make, child))


def is_silu(activation: object) -> bool:
    """Whether an activation is SiLU, by any of its names."""
    return activation is F.silu or type(activation).__name__ in ("SiLU", "SiLUActivation")


def _is_gated_mlp(module: nn.Module) -> bool:
    """Exactly a gate, an up and a down projection with SiLU between: anything more would be lost by replacing it."""
    children = dict(module.named_children())
    parts = [children.get(name) for name in ("gate_proj", "up_proj", "down_proj")]
    activation = getattr(module, "act_fn", None)
    gate, up, _ = parts
    return (
        all(type(part) is nn.Linear for part in parts)
        and set(children) <= {"gate_proj", "up_proj", "down_proj", "act_fn"}
        and is_silu(activation)
        and (getattr(gate, "bias", None) is None) == (getattr(up, "bias", None) is None)
    )
