"""Weights in int8: a change of the model, made once and named, after which nothing is lost by keeping bytes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from specwire.law.errors import InvalidArgument
from specwire.lm import hf_model, native
from specwire.lm.checkpoint import find
from specwire.lm.int8 import LARGEST, quantize, round_linears
from specwire.lm.port import Feed
from specwire.lm.torch_load import load_weights

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]


@given(
    st.integers(1, 5),
    st.integers(1, 40),
    st.integers(0, 2**32),
    st.sampled_from([1e-30, 1e-3, 1.0, 1e5]),
)
def test_quantizing_again_changes_nothing(outputs: int, inputs: int, seed: int, size: float) -> None:
    """To the last bit: bytes and scales say what the float32 numbers say."""
    weight = size * torch.randn(outputs, inputs, generator=torch.Generator().manual_seed(seed))
    whole, scale = quantize(weight)
    rounded = whole * scale[:, None]
    again, same_scale = quantize(rounded)

    assert torch.equal(again, whole)
    assert torch.equal(same_scale, scale)
    assert torch.equal(again.double() * same_scale.double()[:, None], rounded.double())
    assert ((weight - rounded).abs() <= 0.5001 * scale[:, None]).all()
    assert int(whole.abs().max()) in (LARGEST - 1, LARGEST)


def test_an_output_of_nothing_stays_nothing() -> None:
    """No division by a scale of zero."""
    whole, scale = quantize(torch.tensor([[0.0, 0.0], [1.0, -2.0]]))

    assert whole.tolist() == [[0, 0], [64, -127]] or whole.tolist() == [[0, 0], [63, -127]]
    assert scale[0] == 1.0


def test_only_linear_layers_are_rounded() -> None:
    """Norms, embeddings of their own and biases stay."""
    model = nn.Sequential(nn.Embedding(5, 8), nn.LayerNorm(8), nn.Linear(8, 3))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    round_linears(model)

    changed = [name for name, value in model.state_dict().items() if not torch.equal(value, before[name])]
    assert changed == ["2.weight"]


def test_compiled_layers_compute_the_rounded_model(load: Callable[..., Any]) -> None:
    """The same model in float32 by torch's own layers; near the original, and not the original."""
    exact = load("llama").forward([Feed(0, 0, PROMPT, 8)]).clone()
    eager = load("llama", precision="int8", fused=False).forward([Feed(0, 0, PROMPT, 8)]).clone()
    model = load("llama", precision="int8", compiled=True)
    scores = model.forward([Feed(0, 0, PROMPT, 8)])

    assert model.compiled is (native.load(torch.int8) is not None)
    torch.testing.assert_close(scores, eager, rtol=1e-4, atol=1e-5)
    distance = (scores - exact).square().mean().sqrt() / exact.std()
    assert 1e-5 < distance < 0.05
    assert (model.spec.precision, model.spec.device) == ("int8", "cpu")


def test_a_gpu_is_told_what_it_can_have(checkpoint: Callable[[str], Any]) -> None:
    """The bytes are for CPUs."""
    found = find(str(checkpoint("llama")), None, None)
    with pytest.raises(InvalidArgument, match="precision: got 'int8'"):
        load_weights("m", found, hf_model.read_config(found), torch.device("cuda"), torch.int8)
