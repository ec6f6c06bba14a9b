"""The hook for faster linear layers: whatever a device does better than `torch.nn.Linear` is put in here and nowhere else.

Float32 on a CPU: oneDNN with weights packed once for small batches. On two cores without AVX-512, all layers of a 135M model:
1 row 56 -> 56 ms, 5 rows 97 -> 61 ms, 9 rows 113 -> 57 ms, 40 rows 157 -> 101 ms; and a row's result does not depend on
how many rows there are, which `torch.nn.Linear` does not promise. The packed copy replaces the weights, except where an
embedding table shares them. Half precisions stay with torch, whose kernels use the CPU's own instructions where it has any.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

PACKED_FOR_ROWS = 8
"""Batch size the packing is tuned for. One value for every batch, so that every batch is computed by the same kernel."""


def can_pack() -> bool:
    """Whether this torch has the packed kernel. It is the one that torch.compile uses for frozen weights."""
    ops = getattr(torch.ops, "mkldnn", None)
    return (
        bool(torch._C._has_mkldnn)
        and ops is not None
        and hasattr(ops, "_reorder_linear_weight")
        and hasattr(ops, "_linear_pointwise")
    )


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


class PackedGatedMLP(nn.Module):
    """down(silu(gate(x)) * up(x)) with gate and up as one product, as in Llama, Qwen and Mistral."""

    def __init__(self, gate: nn.Linear, up: nn.Linear, down: nn.Linear) -> None:
        super().__init__()
        self.gate_up = make_linear(gate, up)
        self.down = make_linear(down)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """The block's output, same shape as its input."""
        gate, up = self.gate_up(inputs).chunk(2, dim=-1)
        output: torch.Tensor = self.down(F.silu(gate).mul_(up))
        return output


def make_linear(*layers: nn.Linear) -> nn.Module:
    """One frozen layer whose output is those of `layers` side by side. All of them have a bias, or none."""
    weights, biases = zip(*((layer.weight.detach(), layer.bias) for layer in layers), strict=True)
    weight = weights[0] if len(layers) == 1 else torch.cat(weights)
    bias = None if biases[0] is None else torch.cat([bias.detach() for bias in biases])
    if _packs(weight.dtype, weight.device):
        return PackedLinear(weight, bias)
    joined = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
    joined.weight = nn.Parameter(weight, requires_grad=False)
    if bias is not None:
        joined.bias = nn.Parameter(bias, requires_grad=False)
    return joined


def prepare_linears(model: nn.Module, dtype: torch.dtype, device: torch.device) -> None:
    """May replace linear layers of a loaded model, in place, by modules of the same function. Called once, at loading."""
    if not _packs(dtype, device):
        return
    with torch.inference_mode():
        for parent in list(model.modules()):
            for name, child in list(parent.named_children()):
                if _is_gated_mlp(child):
                    setattr(parent, name, PackedGatedMLP(child.gate_proj, child.up_proj, child.down_proj))  # type: ignore[arg-type]
                elif type(child) is nn.Linear:
                    setattr(parent, name, make_linear(child))


def _packs(dtype: torch.dtype, device: torch.device) -> bool:
    return dtype is torch.float32 and device.type == "cpu" and can_pack()


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
