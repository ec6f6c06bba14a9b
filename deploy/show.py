"""The commands that only look: `status`, `logs`, and the lists of `models`."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Group, RenderableType
from rich.live import Live

from deploy import lifecycle, ready, render, state
from deploy.state import Running, StateError
from specwire.law.errors import InvalidArgument

if TYPE_CHECKING:
    from specwire.v1 import inference_pb2 as pb


def status(address: str | None, *, as_json: bool, watch: bool, actors: bool) -> None:
    """Prints the state of the service. Raises Unavailable when it does not answer."""
    running = state.folder().read()
    endpoint = lifecycle.endpoint(address)
    if running is not None and running.endpoint != endpoint:
        running = None  # another service than the one started here
    if watch:
        _watch(endpoint, running)
        return
    stats = asyncio.run(ready.probe(endpoint))
    report = _actors(running) if actors else None
    if as_json:
        print(json.dumps(_plain(stats, endpoint, running, report), ensure_ascii=False))
    elif stats is not None:
        render.console().print(_view(stats, endpoint, running, report))
    if stats is None:
        raise ready.unavailable(endpoint)


def _watch(endpoint: str, running: Running | None) -> None:
    with Live(console=render.console(), auto_refresh=False) as live:
        while True:
            stats = asyncio.run(ready.probe(endpoint))
            view = f"nobody answers at {endpoint}" if stats is None else _view(stats, endpoint, running, None)
            live.update(view, refresh=True)
            time.sleep(1.0)


def _view(
    stats: pb.GetStatsResponse, endpoint: str, running: Running | None, report: list[dict[str, Any]] | None
) -> RenderableType:
    view = render.status(stats, endpoint, running)
    return view if report is None else Group(view, render.actors(report))


def _actors(running: Running | None) -> list[dict[str, Any]]:
    if running is None or running.ray is None:
        raise InvalidArgument("--actors", True, "absent: what runs here was not started with Ray")
    from deploy import cluster

    found: list[dict[str, Any]] = cluster.report(state.folder(), running)
    return found


def _plain(
    stats: pb.GetStatsResponse | None, endpoint: str, running: Running | None, report: list[dict[str, Any]] | None
) -> dict[str, Any]:
    """For programs: the service's own words, and what was started here."""
    found: dict[str, Any] = {"endpoint": endpoint, "answers": stats is not None}
    if stats is not None:
        found |= render.plain(stats)
    if running is not None:
        found["mode"] = running.mode
        found["processes"] = [
            {"name": p.name, "pid": p.pid, "alive": p.alive, "restarts": p.restarts} for p in running.processes
        ]
    if report is not None:
        found["actors"] = report
    return found


def logs(role: str | None, *, follow: bool, lines: int) -> None:
    """Prints the ends of the logs, each line with its service's name when there are several."""
    folder = state.folder()
    running = folder.read()
    if running is not None and running.ray is not None and not running.ray.started:
        raise StateError(f"the logs are with the Ray at {running.ray.address}: ray logs actor --name NAME")
    files = {path.stem: path for path in sorted(folder.logs.glob("*.log"))}
    if not files:
        raise StateError("no logs: nothing was started here")
    if role is not None:
        if role not in files:
            raise InvalidArgument("role", role, f"one of {', '.join(files)}")
        files = {role: files[role]}
    prefix = {name: f"{name:>12} | " if len(files) > 1 else "" for name in files}
    with contextlib.ExitStack() as stack:
        opened = {name: stack.enter_context(path.open(errors="replace")) for name, path in files.items()}
        for name, handle in opened.items():
            _print(prefix[name], handle.readlines()[-lines:])
        while follow:
            sys.stdout.flush()
            fresh = [_print(prefix[name], handle.readlines()) for name, handle in opened.items()]
            if not any(fresh):
                time.sleep(0.2)


def _print(prefix: str, lines: Sequence[str]) -> int:
    for line in lines:
        print(prefix + line.rstrip("\n"))
    return len(lines)


def fetch(name: str) -> None:
    """Brings a model here, with bars, and says where it lies."""
    from deploy import models

    with models.bars() as report:
        path = models.fetch(name, report)
    print(path)


def list_models() -> None:
    """Prints what is in the cache, and what is damaged."""
    from deploy import models

    for entry in models.listing():
        damage = f"  damaged: {'; '.join(entry.wrong)}" if entry.wrong else ""
        print(f"{entry.name:<12} {entry.num_bytes / 1e6:>8.1f} MB  {entry.path}{damage}")


def verify(name: str | None) -> None:
    """Reads every byte of a model; without a name, of all that `list_models` shows, and of the demo, which then must be here.
    Raises ModelError with a line for each that is not good, or Unavailable if none is damaged and one is not here."""
    from deploy import models
    from specwire.law.errors import SpecwireError, Unavailable

    wrong: list[SpecwireError] = []
    for each in [name] if name is not None else dict.fromkeys(("demo", *(entry.name for entry in models.listing()))):
        try:
            path = models.verify(each)
        except (models.ModelError, Unavailable) as error:
            wrong.append(error)
            continue
        print(f"{each}: good, {path}" if path != each else f"{each}: good, it has no files")
    if wrong:
        kind = next((type(each) for each in wrong if not isinstance(each, Unavailable)), Unavailable)
        raise kind("\n".join(map(str, wrong)))
