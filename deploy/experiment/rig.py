"""Services for an experiment: plain processes of a topology, with relays in their links, in a folder that goes away."""

from __future__ import annotations

import contextlib
import socket
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deploy import processes
from deploy.configs import service_configs
from deploy.experiment.relay import Relay
from deploy.lifecycle import resolver
from deploy.state import StateFolder
from deploy.topology import Topology

START_S = 180.0


@dataclass(frozen=True, slots=True)
class Rig:
    """What runs."""

    address: str
    """Of the coordinator."""
    relays: Mapping[str, Relay]
    """By worker."""


@contextlib.contextmanager
def rig(
    topology: Topology,
    relayed: Sequence[str] = (),
    progress: Callable[[str], None] = lambda said: None,
    settings: Mapping[str, Mapping[str, Any]] | None = None,
) -> Iterator[Rig]:
    """Starts everything on free ports, waits until it serves, and stops it afterwards. `relayed`: workers whose link goes through a
    relay, which adds nothing at first. `settings`: more settings of services, by name. Raises StartError."""
    ports = iter(_free_ports(1 + len(relayed)))
    address = f"127.0.0.1:{next(ports)}"
    with contextlib.ExitStack() as stack:
        folder = StateFolder(Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="specwire-"))))
        configs = service_configs(topology, resolver(), address)
        configs["coordinator"]["bind"] = address
        relays = {}
        for name, config in configs.items():
            config.update((settings or {}).get(name, {}))
            config["metrics_port"] = None
            if name in relayed:
                port = next(ports)
                relays[name] = stack.enter_context(Relay("127.0.0.1", port))
                config |= {"bind": f"127.0.0.1:{port}", "advertise": relays[name].address}
        with folder.exclusively():
            processes.up(folder, topology, configs, "experiment", START_S, progress)
        stack.callback(processes.down, folder, 2.0)
        yield Rig(address, relays)


def _free_ports(count: int) -> list[int]:
    """Ports that nobody listens on now."""
    with contextlib.ExitStack() as stack:
        found = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [each.getsockname()[1] for each in found]
