"""The command line: what it asks of the modules behind it, what it prints, and the exit status of each kind of failure."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import pkgutil
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from deploy import ask, cli, lifecycle, ready, state
from deploy.models import checksums
from deploy.ready import StartError
from deploy.state import StateError
from specwire.client import Event, Final, Started, Tokens
from specwire.law.errors import InvalidArgument, NoRoom, OurFault, SpecwireError, TooLate, Unavailable
from specwire.v1 import inference_pb2 as pb
from specwire.v1 import types_pb2

FINAL = Final(
    finish_reason="stop",
    stop=None,
    text="!",
    usage=pb.Usage(prompt_tokens=3, completion_tokens=3),
    seed=2**63 + 1,
    speculation=pb.SpeculationStats(rounds=2, drafts=1, drafted=2, accepted=1, drafted_by_model=2, accepted_by_model=1),
    timing=pb.Timing(total_us=1_000_000),
    rounds=(pb.Round(index=0, drafted=2, accepted=1, committed=2),),
)
EVENTS: list[Event] = [
    Started("r1", "demo", 2**63 + 1, 3, 512, types_pb2.Sampling()),
    Tokens((5, 6), "Hi"),
    Tokens((7,), ""),
    FINAL,
]

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Run:
    """Runs a command as the console script does, in a state folder of its own; returns status, stdout, stderr."""
    monkeypatch.setenv("SPECWIRE_STATE", str(tmp_path))
    monkeypatch.delenv("SPECWIRE_ADDRESS", raising=False)
    monkeypatch.setattr(cli.signal, "signal", lambda number, handler: None)  # the tests' own Ctrl-C stays

    def call(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["specwire", *arguments])
        with pytest.raises(SystemExit) as left:
            cli.main()
        captured = capsys.readouterr()
        return int(left.value.code or 0), captured.out, captured.err

    return call


class FakeClient:
    """Answers every request with EVENTS, or fails. Remembers what was asked."""

    asked: dict[str, Any]
    fails: BaseException | None = None
    fails_after = 0
    """Events that come before it fails."""

    def __init__(self, address: str, retry_for_s: float = 0.0) -> None:
        self.address = address

    async def __aenter__(self) -> FakeClient:
        return self

    async def __aexit__(self, *exc: object) -> None:
        return None

    async def generate(self, **fields: Any) -> AsyncIterator[Event]:
        type(self).asked = {"address": self.address, **fields}
        for count, event in enumerate(EVENTS):
            if self.fails is not None and count == self.fails_after:
                raise self.fails
            yield event

    async def stats(self, timeout: float) -> pb.GetStatsResponse:
        return pb.GetStatsResponse(version="0.1.0", ready=True)


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch) -> type[FakeClient]:
    """In the place of the real one."""

    class Fresh(FakeClient):
        pass

    monkeypatch.setattr(ask, "Client", Fresh)
    monkeypatch.setattr(ready, "Client", Fresh)
    return Fresh


@pytest.mark.parametrize("command", [[], ["up"], ["down"], ["status"], ["generate"], ["logs"], ["models", "fetch"]])
def test_every_command_explains_itself(run: Run, command: list[str]) -> None:
    """With an example, and the exit statuses at the top."""
    status, out, _ = run(*command, "--help")

    assert 0 == status
    assert ("Exit status:" if not command else "Example:  specwire") in out


def test_the_answer_goes_to_stdout_and_the_rest_to_stderr(run: Run, client: type[FakeClient]) -> None:
    """So that the text can be piped on."""
    status, out, err = run("generate", "Hello")

    assert (0, "Hi!\n") == (status, out)
    assert "acceptance 0.50 (draft 1/2)" in err
    assert [{"role": "user", "content": "Hello"}] == client.asked["messages"]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ([], {"num_speculative_tokens": None, "method": None, "temperature": None, "timeout": None}),
        (["--plain"], {"num_speculative_tokens": 0}),
        (["--num-speculative-tokens", "auto"], {"num_speculative_tokens": "auto"}),
        (["--num-speculative-tokens", "0"], {"num_speculative_tokens": 0}),
        (["--num-speculative-tokens", "5", "--method", "ngram"], {"num_speculative_tokens": 5, "method": "ngram"}),
        (["--law", "rejection", "--seed", "18446744073709551615"], {"law": "rejection", "seed": 2**64 - 1}),
        (
            ["--temperature", "0.5", "--top-k", "4", "--top-p", "0.9", "--min-p", "0.1"],
            {"temperature": 0.5, "top_k": 4},
        ),
        (["--stop", "a", "--stop", "b", "--max-tokens", "9"], {"stop": ["a", "b"], "max_tokens": 9}),
        (
            ["--show-rounds", "--timeout", "3", "--ignore-eos"],
            {"return_rounds": True, "timeout": 3.0, "ignore_eos": True},
        ),
        (["--address", "127.0.0.1:9"], {"address": "127.0.0.1:9"}),
        (["--raw"], {"prompt": "x"}),
        (
            ["--system", "be brief"],
            {"messages": [{"role": "system", "content": "be brief"}, {"role": "user", "content": "x"}]},
        ),
    ],
)
def test_options_become_fields_of_the_request(
    run: Run, client: type[FakeClient], options: list[str], expected: dict[str, Any]
) -> None:
    """And what is not said is left to the server."""
    run("generate", "x", *options)

    assert expected == {key: client.asked[key] for key in expected}


def test_ids_go_as_they_are(run: Run, client: type[FakeClient]) -> None:
    """For services without a tokenizer."""
    run("generate", "1, 2 3", "--ids")

    assert [1, 2, 3] == client.asked["prompt_ids"]


def test_ids_come_as_they_are_committed(run: Run, client: type[FakeClient], monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the service has no tokenizer; also what came before a failure is seen."""
    started = EVENTS[0]
    assert isinstance(started, Started)
    events = [
        dataclasses.replace(started, ids_only=True),
        Tokens((7, 8), ""),
        Tokens((9,), ""),
        dataclasses.replace(FINAL, text=""),
    ]
    monkeypatch.setattr(sys.modules[__name__], "EVENTS", events)
    whole = run("generate", "1,2", "--ids")
    client.fails, client.fails_after = Unavailable("gone"), 3
    broken = run("generate", "1,2", "--ids")

    assert (0, "7 8 9\n") == whole[:2]
    assert (4, "7 8 9\n") == broken[:2]


def test_the_prompt_may_come_from_standard_input(
    run: Run, client: type[FakeClient], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`-` stands for it."""
    import io

    monkeypatch.setattr(sys, "stdin", io.StringIO("long text"))
    run("generate", "-", "--raw")

    assert "long text" == client.asked["prompt"]


def test_json_is_one_object_with_everything(run: Run, client: type[FakeClient]) -> None:
    """Nothing else on stdout, 64-bit numbers unharmed."""
    status, out, _ = run("generate", "x", "--json", "--show-rounds")
    found = json.loads(out)

    assert (0, "Hi!", [5, 6, 7], 2**63 + 1) == (status, found["text"], found["token_ids"], found["seed"])
    assert (1_000_000, 2, 1) == (found["timing"]["total_us"], found["speculation"]["rounds"], len(found["rounds"]))


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (InvalidArgument("temperature", -1, "at least 0"), 2),
        (Unavailable("no target is ready"), 3),
        (NoRoom("64 wait already"), 4),
        (TooLate("deadline exceeded"), 4),
        (OurFault("a bug"), 4),
    ],
)
def test_the_exit_status_tells_whose_fault_it_was(
    run: Run, client: type[FakeClient], error: SpecwireError, status: int
) -> None:
    """2 the caller's, 3 no service, 4 the request failed; one line says why."""
    client.fails = error

    assert (status, "", f"specwire: {error}\n") == run("generate", "x")


def test_a_service_lost_in_mid_answer_is_a_failed_request(run: Run, client: type[FakeClient]) -> None:
    """Not one that never was: the status tells half an answer from none, and what is said of it has a line of its own."""
    client.fails, client.fails_after = Unavailable("Socket closed"), 3
    status, out, err = run("generate", "x")

    expected = "specwire: the service was lost in mid-answer, after 3 tokens: Socket closed\n"
    assert (4, "Hi\n", expected) == (status, out, err)


def test_a_timeout_of_ones_own_is_named(run: Run, client: type[FakeClient]) -> None:
    """In the words of the option that set it, whatever the library says of it."""
    client.fails, client.fails_after = TooLate("Stream removed (Deadline Exceeded)"), 2

    assert (4, "", "specwire: the request did not end within 1.5 s (--timeout); 2 tokens had come\n") == run(
        "generate", "x", "--timeout", "1.5", "--json"
    )


@pytest.mark.parametrize(
    ("redirection", "said"), [(">/dev/full", "No space left on device"), (">&-", "standard output is closed")]
)
def test_an_answer_that_cannot_be_written(redirection: str, said: str, tmp_path: Path) -> None:
    """One line and a status, from a process of its own: the interpreter's end writes as well."""
    code = "from tests.unit.deploy.test_cli import *; ask.Client = ready.Client = FakeClient; cli.main()"
    command = f'"{sys.executable}" -c "{code}" generate x {redirection}'
    root = Path(cli.__file__).parents[1]
    done = subprocess.run(command, shell=True, cwd=root, capture_output=True, text=True, check=False)

    assert (4, f"specwire: cannot write the answer: {said}\n") == (done.returncode, done.stderr)


def test_the_folder_of_a_model(run: Run) -> None:
    """For services that are started by hand."""
    from deploy.models import store

    assert (0, f"{store.draft_folder()}\n", "") == run("models", "path", "demo-draft")


def test_down_with_nothing_running_is_no_failure(run: Run) -> None:
    """It is as if it had just been done."""
    assert (0, "", "specwire: nothing is running\n") == run("down")


INTERRUPTED = (130, "specwire: interrupted\n")


@pytest.mark.parametrize(("before", "shown"), [(0, ""), (1, ""), (2, "Hi\n"), (3, "Hi\n")])
def test_ctrl_c_is_130_and_one_line(run: Run, client: type[FakeClient], before: int, shown: str) -> None:
    """As for any program that was interrupted; half an answer before it gets an end of its line."""
    client.fails, client.fails_after = KeyboardInterrupt(), before
    status, out, err = run("generate", "x")

    assert (INTERRUPTED, shown) == ((status, err), out)


def test_ctrl_c_leaves_no_half_json(run: Run, client: type[FakeClient]) -> None:
    """There is an object or nothing."""
    client.fails, client.fails_after = KeyboardInterrupt(), 3
    status, out, err = run("generate", "x", "--json")

    assert (INTERRUPTED, "") == ((status, err), out)


@pytest.mark.parametrize(
    ("command", "interrupted"),
    [
        (["up"], "deploy.lifecycle.up"),
        (["down"], "deploy.lifecycle.down"),
        (["status"], "deploy.ready.probe"),
        (["status", "--watch"], "deploy.ready.probe"),
        (["logs", "-f"], "deploy.show.time.sleep"),
        (["bench"], "deploy.bench.bench.measure"),
        (["models", "fetch"], "deploy.models.download._fetch_demo"),
        (["models", "verify"], "deploy.models.store.problems"),
        (["version"], "deploy.cli.typer.echo"),
    ],
)
def test_ctrl_c_ends_every_command_alike(
    run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, command: list[str], interrupted: str
) -> None:
    """Also those that go on until then."""
    state.folder().prepare()
    state.folder().log("target-0").touch()
    (tmp_path / "models" / "demo").mkdir(parents=True)
    monkeypatch.setenv("SPECWIRE_CACHE", str(tmp_path))
    where, name = interrupted.rsplit(".", 1)
    real = getattr(pkgutil.resolve_name(where), name)
    pressed: list[int] = []

    def once(*arguments: Any, **options: Any) -> Any:
        pressed.append(1)
        if len(pressed) == 1:
            raise KeyboardInterrupt
        return real(*arguments, **options)

    monkeypatch.setattr(interrupted, once)
    status, out, err = run(*command)

    assert (INTERRUPTED, "") == ((status, err), out)


@pytest.mark.parametrize("at", ["app", "exit_code"])
def test_ctrl_c_outside_of_a_command(run: Run, monkeypatch: pytest.MonkeyPatch, at: str) -> None:
    """Before the library has begun, and while a failure is being told."""

    def press(*_: object) -> None:
        raise KeyboardInterrupt

    def fail() -> None:
        raise OurFault("a bug")

    monkeypatch.setattr(cli, "app", fail)
    monkeypatch.setattr(cli, at, press)

    assert INTERRUPTED == run("version")[::2]


def test_ctrl_c_before_anything_is_loaded() -> None:
    """Where a traceback of the library's imports would come."""
    code = (
        "import sys\n"
        "class Finder:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'typer': raise KeyboardInterrupt\n"
        "sys.meta_path.insert(0, Finder())\n"
        "from deploy.cli import main"
    )
    root = Path(cli.__file__).parents[1]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=False)

    assert INTERRUPTED == (done.returncode, done.stderr)


@pytest.mark.parametrize(
    ("asked", "told"), [(513, "specwire: max_tokens: 513 asked, 512 fit the context\n"), (512, ""), (None, "")]
)
@pytest.mark.parametrize("options", [[], ["--json"]])
def test_an_answer_that_will_be_cut_short_is_told(
    run: Run, client: type[FakeClient], asked: int | None, told: str, options: list[str]
) -> None:
    """Before it comes; what the server chose itself is no cut."""
    client.fails, client.fails_after = OurFault("a bug"), 1
    _, out, err = run("generate", "x", *(["--max-tokens", str(asked)] if asked else []), *options)

    assert ("", told + "specwire: a bug\n") == (out, err)


def test_json_tells_the_limit_in_force(run: Run, client: type[FakeClient]) -> None:
    """For programs, which read no notes."""
    assert 512 == json.loads(run("generate", "x", "--max-tokens", "600", "--json")[1])["max_tokens"]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ([], {"messages": [{"role": "user", "content": ""}]}),
        (["--raw"], {"prompt": ""}),
        (["--ids"], {"prompt_ids": []}),
    ],
)
def test_an_empty_prompt_goes_as_it_is(
    run: Run, client: type[FakeClient], options: list[str], expected: dict[str, Any]
) -> None:
    """A conversation may hold it; whether a text without characters makes a token, only the service's tokenizer knows."""
    run("generate", "", *options)

    assert expected == {key: client.asked[key] for key in expected}


@pytest.mark.parametrize("command", ["fetch", "path", "verify"])
def test_a_model_that_nobody_knows_is_2(run: Run, monkeypatch: pytest.MonkeyPatch, command: str) -> None:
    """With those that are known."""
    monkeypatch.setenv("SPECWIRE_OFFLINE", "1")
    status, out, err = run("models", command, "nope")

    expected = (
        "specwire: model: got 'nope', must be demo, demo-draft, table, an existing folder or a hub id (owner/name)\n"
    )
    assert (2, "", expected) == (status, out, err)


def test_a_damaged_model_is_not_an_absent_one(run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """4 with the file and what mends it, 3 where there is none, and the list shows both."""
    monkeypatch.setenv("SPECWIRE_CACHE", str(tmp_path))
    absent = run("models", "verify", "demo")
    folder = tmp_path / "models" / "demo"
    folder.mkdir(parents=True)
    (folder / "config.json").write_bytes(b"{}")
    checksums.write_manifest(folder, {})
    good = run("models", "verify", "demo")
    (folder / "config.json").write_bytes(b"")
    damaged, listed = run("models", "verify", "demo"), run("models", "list")

    assert (3, f"specwire: demo is not in the cache ({tmp_path}). First: specwire models fetch demo\n") == absent[::2]
    assert (0, f"demo: good, {folder}\n", "") == good
    told = f"specwire: {folder} is damaged: config.json has 0 bytes, not 2. Repair with: specwire models fetch demo\n"
    assert (4, "", told) == damaged
    assert "damaged: config.json has 0 bytes, not 2" in listed[1].splitlines()[0]


def test_verify_without_a_name_reads_every_model(run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What is good is told although something is damaged, or was never fetched."""
    monkeypatch.setenv("SPECWIRE_CACHE", str(tmp_path))
    absent = run("models", "verify")
    folder = tmp_path / "models" / "demo"
    folder.mkdir(parents=True)
    (folder / "config.json").write_bytes(b"{}")
    checksums.write_manifest(folder, {})
    good = run("models", "verify")
    (folder / "config.json").write_bytes(b"")
    damaged = run("models", "verify")

    assert [(3, ["demo-draft"]), (0, ["demo", "demo-draft"]), (4, ["demo-draft"])] == [
        (status, [line.partition(":")[0] for line in out.splitlines()]) for status, out, _ in (absent, good, damaged)
    ]


def test_verify_of_a_model_without_files(run: Run) -> None:
    """It says that there was nothing to look at."""
    assert (0, "table: good, it has no files\n", "") == run("models", "verify", "table")


def test_nobody_there(run: Run) -> None:
    """The refusal names the address and what to do."""
    status, _, err = run("status", "--address", "127.0.0.1:1")

    assert (3, True) == (
        status,
        err.startswith("specwire: no service answers at 127.0.0.1:1; start one with `specwire up`"),
    )


def test_status_for_programs_also_tells_of_absence(run: Run) -> None:
    """A monitor can parse the answer in any case."""
    status, out, _ = run("status", "--json", "--address", "127.0.0.1:1")

    assert (3, {"endpoint": "127.0.0.1:1", "answers": False}) == (status, json.loads(out))


def test_status_for_programs(run: Run, client: type[FakeClient]) -> None:
    """The service's own words."""
    status, out, _ = run("status", "--json")
    found = json.loads(out)

    assert (0, True, True, "0.1.0") == (status, found["answers"], found["ready"], found["version"])


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("generate", "x", "--plain", "--num-speculative-tokens", "3"), "--plain"),
        (
            ("generate", "x", "--num-speculative-tokens", "-3"),
            "--num-speculative-tokens: got '-3', must be auto or a whole",
        ),
        (("generate", "x", "--num-speculative-tokens", "many"), "--num-speculative-tokens: got 'many'"),
        (("generate", "x", "--method", "magic"), "method: got 'magic', must be auto, draft_model or ngram"),
        (("generate", "1;2", "--ids"), "PROMPT: got '1;2', must be token ids"),
        (("generate", "1,,2", "--ids"), "PROMPT: got '1,,2', must be token ids"),
        (("generate", "1,2,", "--ids"), "PROMPT: got '1,2,', must be token ids"),
        (("models", "path", ""), "model: got '', must be demo, demo-draft, table"),
        (("models", "fetch", " "), "model: got ' ', must be demo, demo-draft, table"),
        (("generate", "x", "--raw", "--system", "y"), "--system"),
        (("generate", "x", "--address", "nowhere"), "must be host:port"),
        (("status", "--actors"), "--actors"),
        (("up", "nope.yaml"), "nope.yaml: no such file"),
        (("models", "path", "no such/thing"), "model: got 'no such/thing', must be demo, demo-draft, table"),
        (("logs",), "nothing was started here"),
        (("frobnicate",), "No such command 'frobnicate'"),
        (("up", "--timeout", "0"), "--timeout"),
        (("up", ""), "TOPOLOGY: got '', must be a YAML file"),
    ],
)
def test_wrong_usage_is_2_and_says_why(run: Run, arguments: tuple[str, ...], said: str) -> None:
    """One message, no traceback."""
    status, out, err = run(*arguments)

    assert (2, "", True, False) == (status, out, said in err, "Traceback" in err)


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (OSError(28, "No space left on device"), "specwire: standard output: No space left on device"),
        (FileExistsError(17, "File exists", "/state"), "specwire: /state: File exists"),
    ],
)
def test_what_the_system_refuses_is_one_line(
    run: Run, monkeypatch: pytest.MonkeyPatch, error: OSError, said: str
) -> None:
    """Where no command knew better: a full disk is no bug."""

    def fails(*arguments: Any) -> Any:
        raise error

    monkeypatch.setattr(lifecycle, "down", fails)

    assert (4, "", f"{said}\n") == run("down")


def test_what_an_interrupt_left_half_done_is_no_fault_of_its_own(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """A library whose import was interrupted fails in its own way."""

    def fails(*arguments: Any) -> Any:
        try:
            raise KeyboardInterrupt
        except KeyboardInterrupt:
            raise AttributeError("partially initialized module") from None

    monkeypatch.setattr(lifecycle, "down", fails)

    assert (130, "", "specwire: interrupted\n") == run("down")


def test_a_state_folder_that_cannot_be_made(run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """It is named, with the variable that says where it is."""
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("SPECWIRE_STATE", str(tmp_path / "file"))
    status, _, err = run("up", "table", "--no-ray")

    assert (2, True) == (status, "cannot be made (File exists); SPECWIRE_STATE says where" in err)


def test_a_closed_standard_input_has_no_prompt(
    run: Run, client: type[FakeClient], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`-` stands for it."""
    monkeypatch.setattr(sys, "stdin", None)
    status, _, err = run("generate", "-")

    assert (2, "specwire: PROMPT: got '-', must be a text: standard input is closed\n") == (status, err)


def test_a_failed_start_is_3(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """The part that failed and its last words come as they are."""

    def fail(*arguments: object) -> None:
        raise StartError("target-0 exited with code 2 while starting. It said:\nno such model")

    monkeypatch.setattr(lifecycle, "up", fail)

    assert (3, "", "specwire: target-0 exited with code 2 while starting. It said:\nno such model\n") == run("up")


def test_a_second_up_is_2(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is a mistake of whoever typed it."""

    def refuse(*arguments: object) -> None:
        raise StateError("already running: default")

    monkeypatch.setattr(lifecycle, "up", refuse)

    assert 2 == run("up")[0]


def test_logs_name_their_service(run: Run) -> None:
    """Several logs in one stream; one alone as it is."""
    folder = state.folder()
    folder.prepare()
    folder.log("coordinator").write_text("one\n")
    folder.log("target-0").write_text("two\nthree\n")

    assert (0, " coordinator | one\n    target-0 | two\n    target-0 | three\n", "") == run("logs")
    assert (0, "three\n", "") == run("logs", "target-0", "-n", "1")
    assert 2 == run("logs", "draft-9")[0]


def test_help_loads_nothing_heavy() -> None:
    """`specwire --help` comes at once: no torch, no Ray, no gRPC, no numpy."""
    code = (
        "import sys; sys.argv = ['specwire', '--help']\n"
        "from deploy import cli\n"
        "try: cli.main()\n"
        "except SystemExit: pass\n"
        "print(sorted({'torch', 'ray', 'grpc', 'numpy', 'pydantic', 'rich'} & set(sys.modules)), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert "[]\n" == done.stderr


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("--concurrency", "two"), "--concurrency: got 'two', must be whole numbers"),
        (("--concurrency", "0"), "--concurrency: got 0, must be at least 1"),
        (("--concurrency", ""), "--concurrency: got 'nothing'"),
        (("--concurrency", "1,,2"), "--concurrency: got '1,,2', must be whole numbers"),
        (
            ("/",),
            "workload: got '/', must be chat, code, summarise, extract, story, or a JSONL file that can be read (Is a",
        ),
        (("--compare", "vllm"), "--compare: got 'vllm', must be hf"),
        (("--compare", "hf"), "--compare: got 'hf', must be used where `specwire up` started the service"),
        (("--output", "/proc/x"), "--output: got '/proc/x', must be a folder that can be written"),
        (("--rate", "-1"), "--rate: got -1.0"),
        (("--rate", "nan"), "--rate: got nan"),
        (("--num-speculative-tokens", "0"), "--num-speculative-tokens: got 0, must be at least 1"),
        (("nosuch",), "workload: got 'nosuch', must be chat, code"),
        (("--method", "guess"), "--method: got 'guess', must be auto, draft_model or ngram"),
    ],
)
def test_bench_says_what_it_cannot_measure(run: Run, arguments: tuple[str, ...], told: str) -> None:
    """Before anything is asked."""
    status, _, err = run("bench", *arguments, "--address", "127.0.0.1:1")

    assert status == cli.EXIT_USAGE
    assert told in err


def test_bench_without_a_service(run: Run) -> None:
    """As every command that needs one."""
    status, out, err = run("bench", "--address", "127.0.0.1:1", "--repeats", "1")

    assert status == cli.EXIT_UNAVAILABLE
    assert "no service answers at 127.0.0.1:1" in err
    assert out == ""


def test_whoever_reads_may_go(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """`specwire generate ... | head`: the library turns it into its own end with status 1, which is not an interrupt."""

    def gone() -> None:
        try:
            raise BrokenPipeError
        except BrokenPipeError:
            sys.exit(1)

    monkeypatch.setattr(cli, "app", gone)
    assert run("version")[0] == 0
    monkeypatch.setattr(cli, "app", lambda: sys.exit(1))
    assert run("version")[0] == cli.EXIT_INTERRUPTED


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            ("generate", "x", "--max-tokens", "0"),
            "--max-tokens: got '0', must be a whole number of at least 1 and at most 4294967295",
        ),
        (
            ("generate", "x", "--seed", "abc"),
            "--seed: got 'abc', must be a whole number of at least 0 and at most 18446744073709551615",
        ),
        (("generate", "x", "--temperature", "nan"), "--temperature: got 'nan', must be a number"),
        (("generate", "x", "--timeout", "0"), "--timeout: got '0', must be a number of at least 0.001"),
        (("down", "--grace", "1e9"), "--grace: got '1e9', must be a number of at least 0 and at most 3600"),
        (("up", "--timeout", "soon"), "--timeout: got 'soon', must be a number of at least 1 and at most 86400"),
        (("bench", "--repeats", "1.5"), "--repeats: got '1.5', must be a whole number of at least 1"),
        (("logs", "-n", "0"), "--lines: got '0', must be a whole number of at least 1"),
        (("up", "."), "TOPOLOGY: got '.', must be a YAML file or the name of a shipped one"),
    ],
)
def test_a_wrong_number_is_one_line(run: Run, arguments: tuple[str, ...], said: str) -> None:
    """Option, value and limit, in the words of all other refusals."""
    assert (2, "", f"specwire: {said}\n") == run(*arguments)


@pytest.mark.parametrize("command", ["up", "down"])
def test_a_full_disk_is_that_of_the_state(
    run: Run, command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which a failed write does not say, and standard output is not."""

    def full(*arguments: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(state.StateFolder, "read", full)

    status, _, err = run(command)

    assert (2, f"specwire: {tmp_path}: No space left on device; SPECWIRE_STATE says where") == (
        status,
        err[: err.index(" the state")],
    )
