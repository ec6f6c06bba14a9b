"""Weights as whole numbers from -127 to 127, each output with a scale of its own, as `precision: int8` means them.

Law. It is a change of the model, made once, at loading: the weights become the nearest numbers of that kind and stay float32
numbers, so whatever computes with them computes the same model, and keeping them as bytes loses nothing: quantizing again gives
the same bytes and scales, to the last bit.
"""

from __future__ import annotations

import torch
from torch import nn

LARGEST = 127
_SCALE_BITS = 16
"""Of a scale's mantissa: its product with any of the whole numbers is a float32 number."""


def quantize(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Float32 [outputs, inputs] -> int8 [outputs, inputs], float32 [outputs]."""
    mantissa, exponent = torch.frexp(weight.abs().amax(dim=1) / LARGEST)
    rounded_up = torch.ceil(torch.ldexp(mantissa, torch.tensor(_SCALE_BITS)))  # so that no number exceeds the largest
    scale = torch.ldexp(rounded_up, exponent - _SCALE_BITS)
    scale = torch.where(scale > 0, scale, torch.ones_like(scale))
    return torch.round(weight / scale[:, None]).clamp_(-LARGEST, LARGEST).to(torch.int8), scale


def round_linears(model: nn.Module) -> None:
    """Replaces the weights of every linear layer by the nearest that int8 can hold, in place. Tied embeddings follow their head."""
    with torch.no_grad():
        for module in model.modules():
            if type(module) is nn.Linear:
                whole, scale = quantize(module.weight)
                module.weight.copy_(whole * scale[:, None])
