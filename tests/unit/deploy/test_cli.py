"""The command line: what it asks of the modules behind it, what it prints, and the exit status of each kind of failure."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from deploy import ask, cli, lifecycle, ready, state
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


def test_ctrl_c_is_130(run: Run, client: type[FakeClient]) -> None:
    """As for any program that was interrupted."""
    client.fails = KeyboardInterrupt()

    assert 130 == run("generate", "x")[0]


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
        (("generate", "x", "--raw", "--system", "y"), "--system"),
        (("generate", "x", "--address", "nowhere"), "must be host:port"),
        (("status", "--actors"), "--actors"),
        (("up", "nope.yaml"), "nope.yaml: no such file"),
        (("logs",), "nothing was started here"),
        (("frobnicate",), "No such command 'frobnicate'"),
        (("up", "--timeout", "0"), "--timeout"),
    ],
)
def test_wrong_usage_is_2_and_says_why(run: Run, arguments: tuple[str, ...], said: str) -> None:
    """One message, no traceback."""
    status, out, err = run(*arguments)

    assert (2, "", True, False) == (status, out, said in err, "Traceback" in err)


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
