"""The command line. Every command is a few lines over a module that does the work; nothing heavy is imported before it is needed,
so that `specwire --help` comes at once.

Exit status: 0 done; 2 wrong usage, configuration or request; 3 no service or model here, or one that could not start; 4 the request
failed, or `models verify` found damage; 130 interrupted, with one line that says so.
"""

from __future__ import annotations

import sys

EXIT_USAGE, EXIT_UNAVAILABLE, EXIT_FAILED, EXIT_INTERRUPTED = 2, 3, 4, 130
INTERRUPTED = "specwire: interrupted"
try:
    import contextlib
    import math
    import os
    import signal
    from collections.abc import Callable
    from pathlib import Path
    from types import FrameType
    from typing import Annotated, Any, NoReturn, TypeVar

    import typer

    from specwire import __version__
except KeyboardInterrupt:  # half of the time before a command begins, and too early for `main` to catch it
    print(INTERRUPTED, file=sys.stderr)
    sys.exit(EXIT_INTERRUPTED)

EPILOG = (
    "Exit status: 0 done; 2 wrong usage, configuration or request; 3 no service or model here, or one that could not start; "
    "4 the request failed, or `models verify` found damage; 130 interrupted."
)

app = typer.Typer(
    name="specwire",
    help="Serve a language model with its draft model apart: exact speculative decoding, honest about time.",
    epilog=EPILOG,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
models_app = typer.Typer(help="Fetch and check models.", no_args_is_help=True, pretty_exceptions_enable=False)
app.add_typer(models_app, name="models")

N = TypeVar("N", int, float)


def _number(option: str, least: float = -math.inf, most: float = math.inf) -> Callable[[Any], float]:
    """What an option takes, said in our words: those of the library leave out what was given."""

    def parse(given: Any) -> float:
        return _within(option, given, float, least, most, "a number")

    return parse


def _whole(option: str, least: int, most: float = math.inf) -> Callable[[Any], int]:
    """As `_number`."""

    def parse(given: Any) -> int:
        return _within(option, given, int, least, most, "a whole number")

    return parse


def _within(option: str, given: Any, kind: type[N], least: float, most: float, what: str) -> N:
    from specwire.law.errors import InvalidArgument

    shown = (f"{bound:g}" if isinstance(bound, float) else str(bound) for bound in (least, most))
    bounds = [f"at {name} {bound}" for name, bound in zip(("least", "most"), shown, strict=True) if "inf" not in bound]
    limit = f"{what} of {' and '.join(bounds)}" if bounds else what
    try:
        found = kind(given)
    except ValueError:
        raise InvalidArgument(option, given, limit) from None
    if not least <= found <= most:
        raise InvalidArgument(option, given, limit)
    return found


Address = Annotated[
    str | None,
    typer.Option(help="host:port of the service. Default: SPECWIRE_ADDRESS, then what `specwire up` started."),
]


@app.command(epilog="Example:  specwire up            # the demo pair\n\nExample:  specwire up my.yaml --no-ray")
def up(
    topology: Annotated[
        str | None,
        typer.Argument(help="YAML file, or a shipped one by name: default, plain, table, synthetic, two_gpus."),
    ] = None,
    no_ray: Annotated[bool, typer.Option("--no-ray", help="Plain processes on this machine instead of Ray.")] = False,
    timeout: Annotated[
        float,
        typer.Option(parser=_number("--timeout", 1.0, 86400.0), metavar="SECONDS", help="Until it serves, at most."),
    ] = 180.0,
) -> None:
    """Start coordinator, target and draft, and wait until they serve. They outlive this shell; stop them with `down`."""
    from deploy import lifecycle, render
    from deploy import topology as topologies
    from specwire.law.errors import InvalidArgument

    if topology is not None and not topology.strip("."):
        raise InvalidArgument("TOPOLOGY", topology, "a YAML file or the name of a shipped one")
    plan = topologies.load(None if topology is None else Path(topology))
    console = render.console(stderr=True)
    with console.status("starting") as status:
        running, stats = lifecycle.up(plan, topology or "default", not no_ray, timeout, status.update)
    console.print(render.workers(stats.workers))
    question = '"Why is the sky blue?"' if plan.target.model != topologies.TABLE else "1,2,3 --ids --max-tokens 8"
    console.print(f"Ready at {running.endpoint}. Ask it: specwire generate {question}")


@app.command(epilog="Example:  specwire down --grace 30")
def down(
    grace: Annotated[
        float,
        typer.Option(
            parser=_number("--grace", 0.0, 3600.0), metavar="SECONDS", help="That running requests may take to end."
        ),
    ] = 10.0,
) -> None:
    """Stop what `up` started, by force if need be."""
    from deploy import lifecycle
    from deploy.state import NothingRuns

    try:
        stopped = lifecycle.down(grace)
    except NothingRuns as nothing:
        typer.echo(f"specwire: {nothing}", err=True)
        return
    typer.echo(f"stopped: {', '.join(stopped) or 'nothing was left'}", err=True)


@app.command(epilog="Example:  specwire status --watch\n\nExample:  specwire status --json | jq .speculation")
def status(
    as_json: Annotated[bool, typer.Option("--json", help="For programs, named as in inference.proto.")] = False,
    watch: Annotated[bool, typer.Option("--watch", help="Every second, until Ctrl-C.")] = False,
    actors: Annotated[
        bool, typer.Option("--actors", help="Also what Ray says of each actor (takes some seconds).")
    ] = False,
    address: Address = None,
) -> None:
    """Show workers, devices, models, sessions and acceptance, as the running service tells them."""
    from deploy import show

    show.status(address, as_json=as_json, watch=watch, actors=actors)


@app.command(
    epilog='Example:  specwire generate "Why is the sky blue?" --show-rounds\n\n'
    "Example:  cat prompt.txt | specwire generate - --plain --seed 7 --temperature 0.8"
)
def generate(
    prompt: Annotated[
        str, typer.Argument(help="The user's message, which may be empty; `-` reads it from standard input.")
    ],
    plain: Annotated[bool, typer.Option("--plain", help="Without speculation; the same as 0 tokens.")] = False,
    num_speculative_tokens: Annotated[
        str | None,
        typer.Option(
            help="Block length, up to the server's limit, or `auto`. Default: the server's setting.", metavar="N|auto"
        ),
    ] = None,
    method: Annotated[str | None, typer.Option(help="Where guesses come from: auto, draft_model or ngram.")] = None,
    law: Annotated[
        str | None,
        typer.Option(help="How blocks are judged: shared_noise (plain decoding's very tokens) or rejection."),
    ] = None,
    max_tokens: Annotated[
        int | None,
        typer.Option(
            parser=_whole("--max-tokens", 1, 2**32 - 1),
            metavar="N",
            help="Most tokens to generate. What the context has no room for is left out, and told.",
        ),
    ] = None,
    temperature: Annotated[
        float | None,
        typer.Option(parser=_number("--temperature"), metavar="X", help="0 is greedy. Default: the model's own."),
    ] = None,
    top_k: Annotated[
        int | None,
        typer.Option(parser=_whole("--top-k", 0), metavar="N", help="Only the best so many tokens; 0: no limit."),
    ] = None,
    top_p: Annotated[
        float | None,
        typer.Option(
            parser=_number("--top-p"), metavar="X", help="Only the best tokens that reach this probability together."
        ),
    ] = None,
    min_p: Annotated[
        float | None,
        typer.Option(
            parser=_number("--min-p"), metavar="X", help="Only tokens with this share of the best one's probability."
        ),
    ] = None,
    seed: Annotated[
        int | None,
        typer.Option(
            parser=_whole("--seed", 0, 2**64 - 1),
            metavar="N",
            help="Same seed, same answer. Default: chosen, and told.",
        ),
    ] = None,
    stop: Annotated[list[str] | None, typer.Option(help="Text that ends the answer; may be given again.")] = None,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Go on past the model's end token.")] = False,
    raw: Annotated[
        bool, typer.Option("--raw", help="PROMPT is the whole text: no chat template. It must make at least one token.")
    ] = False,
    ids: Annotated[bool, typer.Option("--ids", help="PROMPT is token ids, at least one: 1,2,3.")] = False,
    system: Annotated[str | None, typer.Option(help="System message.")] = None,
    private_prompt: Annotated[
        bool, typer.Option("--private-prompt", help="Read the prompt whole, and keep nothing of it for later prompts.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object at the end instead of text.")] = False,
    show_rounds: Annotated[bool, typer.Option("--show-rounds", help="Then a table of rounds and of time.")] = False,
    timeout: Annotated[
        float | None,
        typer.Option(parser=_number("--timeout", 0.001), metavar="SECONDS", help="That the whole request may take."),
    ] = None,
    address: Address = None,
) -> None:
    """Ask, and see the answer as it comes. A summary follows on stderr. Ctrl-C cancels the request at the service too."""
    from deploy import ask, lifecycle
    from specwire.law.errors import InvalidArgument

    block: int | str | None = num_speculative_tokens
    if plain and block is not None:
        raise InvalidArgument("--plain", True, "absent when --num-speculative-tokens is given")
    if isinstance(block, str) and block != "auto":
        if not block.isdecimal():
            raise InvalidArgument("--num-speculative-tokens", block, "auto or a whole number of at least 0")
        block = int(block)
    fields: dict[str, Any] = ask.input_fields(prompt, raw, ids, system) | {
        "max_tokens": max_tokens,
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "min_p": min_p,
        "seed": seed,
        "stop": stop or (),
        "ignore_eos": ignore_eos,
        "num_speculative_tokens": 0 if plain else block,
        "method": method,
        "law": law,
        "return_rounds": show_rounds,
        "private_prompt": private_prompt,
    }
    ask.run(lifecycle.endpoint(address), fields, timeout, as_json)


@app.command(
    epilog="Example:  specwire bench chat code --concurrency 1,4 --output report\n\n"
    "Example:  specwire bench prompts.jsonl --rate 0.5,1 --num-speculative-tokens 1,2,4"
)
def bench(
    workloads: Annotated[
        list[str] | None,
        typer.Argument(
            help="chat, code, summarise, extract, story, or JSONL files: an object a line with `prompt`, and `kind` and "
            "`max_tokens` if wanted. Default: all five."
        ),
    ] = None,
    concurrency: Annotated[str, typer.Option(help="Requests at once, one pass for each number.")] = "1",
    rate: Annotated[str, typer.Option(help="Also requests a second, as they come (open loop).")] = "",
    num_speculative_tokens: Annotated[
        str, typer.Option(help="Fixed block lengths to compare with auto and with plain decoding.", metavar="N,N...")
    ] = "",
    method: Annotated[str, typer.Option(help="Where guesses come from: auto, draft_model or ngram.")] = "auto",
    max_tokens: Annotated[
        int | None,
        typer.Option(
            parser=_whole("--max-tokens", 1, 2**32 - 1),
            metavar="N",
            help="For all requests. Default: the workload's own.",
        ),
    ] = None,
    repeats: Annotated[
        int,
        typer.Option(parser=_whole("--repeats", 1), metavar="N", help="Passes of each variant at each load, in turns."),
    ] = 5,
    compare: Annotated[
        str | None, typer.Option(help="hf: also transformers' generate and assisted generation, one request at a time.")
    ] = None,
    output: Annotated[Path | None, typer.Option(help="Folder for report.json, report.md and plots.")] = None,
    address: Address = None,
) -> None:
    """Measure the running service against its own plain decoding, and say which block length to choose.

    Every request of the workload is asked for each variant, load and repeat: the bar tells how many that are, and for how long."""
    from deploy import lifecycle, render
    from deploy.bench import bench as benchmark
    from deploy.bench import workload

    settings = benchmark.Settings(
        items=workload.load(workloads or workload.SHIPPED, max_tokens),
        concurrency=_numbers("--concurrency", concurrency, int),
        rates=_numbers("--rate", rate, float),
        lengths=_numbers("--num-speculative-tokens", num_speculative_tokens, int),
        method=method,
        repeats=repeats,
        models=benchmark.running_models(compare),
    )
    benchmark.bench(lifecycle.endpoint(address), settings, output, render.console(), render.console(stderr=True))


def _numbers(option: str, text: str, kind: type[N]) -> list[N]:
    """Numbers with commas between them."""
    from specwire.law.errors import InvalidArgument

    try:
        return [kind(part) for part in text.split(",")] if text.strip() else []
    except ValueError:
        what = "whole numbers" if kind is int else "numbers"
        raise InvalidArgument(option, text, f"{what} with commas between them") from None


@app.command(epilog="Example:  specwire logs target-0 -f")
def logs(
    role: Annotated[str | None, typer.Argument(help="coordinator, target-0, draft-0 ... Default: all.")] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on as lines come, until Ctrl-C.")] = False,
    lines: Annotated[
        int, typer.Option("--lines", "-n", parser=_whole("--lines", 1), metavar="N", help="So many last lines of each.")
    ] = 40,
) -> None:
    """Show what the services wrote."""
    from deploy import show

    show.logs(role, follow=follow, lines=lines)


@app.command()
def version() -> None:
    """Show the version."""
    typer.echo(f"specwire {__version__}")


@models_app.command("fetch", epilog="Example:  specwire models fetch demo")
def models_fetch(
    name: Annotated[str, typer.Argument(help="demo (target and draft), demo-draft, or a hub id.")] = "demo",
) -> None:
    """Bring a model into the cache. Goes on where it stopped; checks what it got."""
    from deploy import show

    show.fetch(name)


@models_app.command("list", epilog="Example:  specwire models list")
def models_list() -> None:
    """Show the models in the cache."""
    from deploy import show

    show.list_models()


@models_app.command("path", epilog="Example:  python -m target_service --set model.model=$(specwire models path demo)")
def models_path(name: Annotated[str, typer.Argument(help="As for fetch, or a folder.")] = "demo") -> None:
    """Show the folder that services load for a model."""
    from deploy import models

    typer.echo(models.resolve(name))


@models_app.command("verify", epilog="Example:  specwire models verify demo")
def models_verify(
    name: Annotated[
        str | None, typer.Argument(help="As for fetch. Default: demo, and whatever else `list` shows.")
    ] = None,
) -> None:
    """Check the files of a model against their checksums. Exit status: 3 it is not here; 4 it is, and damaged."""
    from deploy import show

    show.verify(name)


def main() -> None:
    """The console script: runs a command and turns what it raises into a line and an exit status."""
    try:
        for number in (signal.SIGTERM, signal.SIGHUP):  # a closed terminal must not leave behind what was being started
            if signal.getsignal(number) is signal.SIG_DFL:
                signal.signal(number, _interrupt)
        _run()
    except KeyboardInterrupt:
        _interrupted()


def _interrupt(number: int, frame: FrameType | None) -> NoReturn:
    raise KeyboardInterrupt


def _was_interrupted(error: BaseException | None) -> bool:
    """Whether a fault is only what an interrupt left half done, in a library that was being imported for instance."""
    while error is not None:
        if isinstance(error, KeyboardInterrupt):
            return True
        error = error.__cause__ or error.__context__
    return False


def _run() -> None:
    try:
        app()
    except BrokenPipeError:  # `specwire generate ... | head`: whoever read has gone, which is no fault
        _leave_output()
        sys.exit(0)
    except SystemExit as leaving:
        if isinstance(leaving.__context__, BrokenPipeError):
            sys.exit(0)
        if leaving.code in (1, EXIT_INTERRUPTED):  # the library's statuses for Ctrl-C, by its version
            _interrupted()
        raise
    except Exception as error:
        if _was_interrupted(error):
            _interrupted()
        code = exit_code(error)
        if code is None:
            raise
        with contextlib.suppress(OSError):
            typer.echo(f"specwire: {_told(error)}", err=True)
        _leave_output()
        sys.exit(code)


def _interrupted() -> NoReturn:
    """The end of every command that Ctrl-C ended, once it has put away what it had begun."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # pressed twice: this is already the end
    typer.echo(INTERRUPTED, err=True)
    _leave_output()
    sys.exit(EXIT_INTERRUPTED)


def _leave_output() -> None:
    """What is still to be written goes nowhere, so that the interpreter's end cannot fail on it."""
    if sys.stdout is not None:
        with contextlib.suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _told(error: Exception) -> str:
    if isinstance(error, OSError):
        return f"{error.filename or 'standard output'}: {error.strerror or error}"
    return str(error)


def exit_code(error: BaseException) -> int | None:
    """The exit status of an error raised on purpose; None for a bug, which deserves its traceback."""
    from deploy.ready import StartError
    from specwire.law.errors import CallerFault, SpecwireError, Unavailable

    if isinstance(error, CallerFault):
        return EXIT_USAGE
    if isinstance(error, Unavailable | StartError):
        return EXIT_UNAVAILABLE
    return EXIT_FAILED if isinstance(error, SpecwireError | OSError) else None


if __name__ == "__main__":
    main()
