"""`precision: auto` becomes what the device is fast in, and what it became is what the service tells."""

from __future__ import annotations

import contextlib
import platform
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from deploy.topology import load
from specwire.lm.load import ModelConfig, build_model
from specwire.lm.torch_load import fastest_precision
from tests.unit.lm.tiny import refuse

CPU = torch.device("cpu")


@pytest.fixture
def cpu(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Makes this machine's CPU one of a kind, with some of the instructions for bfloat16."""

    def be(machine: str = "x86_64", avx512: bool = False, amx: bool = False, onednn: bool = False) -> None:
        monkeypatch.setattr(platform, "machine", lambda: machine)
        monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: avx512)
        monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: amx)
        monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: onednn)

    return be


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ({}, "float16"),
        ({"avx512": True}, "bfloat16"),
        ({"amx": True}, "bfloat16"),
        ({"onednn": True}, "float16"),  # AVX-512 alone, which oneDNN takes for enough
        ({"machine": "aarch64"}, "float32"),
        ({"machine": "aarch64", "onednn": True}, "bfloat16"),
    ],
)
def test_a_cpu_gets_bfloat16_only_with_instructions_for_it(
    kind: dict[str, object], expected: str, cpu: Callable[..., None]
) -> None:
    """Without them a block would cost as much as plain decoding."""
    cpu(**kind)

    assert expected == fastest_precision(CPU)


@pytest.mark.parametrize(("has", "expected"), [(True, "bfloat16"), (False, "float16")])
def test_a_gpu_gets_bfloat16_where_it_is_not_emulated(
    has: bool, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The question is put to the device that is meant, and emulation does not count."""
    asked: list[object] = []

    @contextlib.contextmanager
    def device(which: object):
        asked.append(which)
        yield

    def supported(including_emulation: bool = True) -> bool:
        return has or including_emulation

    monkeypatch.setattr(torch.cuda, "device", device)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", supported)
    second = torch.device("cuda", 1)

    assert expected == fastest_precision(second)
    assert [second] == asked


@pytest.mark.parametrize(("avx512", "expected"), [(False, "float16"), (True, "bfloat16")])
def test_the_model_says_what_auto_became(
    avx512: bool, expected: str, cpu: Callable[..., None], checkpoint: Callable[[str], Path]
) -> None:
    """The spec, and so WorkerInfo, holds the precision itself; the fingerprint is that of a model told so outright."""
    cpu(avx512=avx512)
    folder = str(checkpoint("llama"))

    actual = build_model(ModelConfig(model=folder, max_sessions=1, precision="auto")).spec
    outright = build_model(ModelConfig(model=folder, max_sessions=1, precision=expected)).spec

    assert expected == actual.precision
    assert outright.fingerprint == actual.fingerprint


def test_tables_have_one_precision() -> None:
    """A table model takes the setting and stays what it is: exact."""
    assert "float64" == build_model(ModelConfig(precision="auto")).spec.precision


@pytest.mark.parametrize("name", ["default", "plain"])
def test_shipped_topologies_leave_it_to_the_device(name: str) -> None:
    """The demo is fast on a CPU of either kind. Only the target's precision shows in answers, so only that is left as it is."""
    topology = load(Path(name))

    assert "auto" == topology.target.precision
    assert topology.draft is None or "int8" == topology.draft.precision


@pytest.mark.parametrize(("value", "field"), [(1e6, "precision"), (float("nan"), "model")])
def test_weights_that_float16_cannot_hold(
    value: float, field: str, cpu: Callable[..., None], checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    """`auto` takes float32 then; float16 itself is refused. What is no number is refused as such."""
    cpu()
    folder = shutil.copytree(checkpoint("llama"), tmp_path / "llama")
    weights = load_file(folder / "model.safetensors")
    weights["model.layers.0.mlp.up_proj.weight"][0, 0] = value
    save_file(weights, folder / "model.safetensors", {"format": "pt"})

    refuse(folder, field, "model.layers.0.mlp.up_proj.weight", precision="float16")
    if field == "precision":
        assert "float32" == build_model(ModelConfig(model=str(folder), max_sessions=1, precision="auto")).spec.precision
