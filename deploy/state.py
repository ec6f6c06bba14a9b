"""What is running: one small file that every shell finds, and what is true of the processes it names.

Law. A process is known by its id *and* when it began, since ids are used again, and that by a clock that nobody sets. The file
is replaced as a whole, never edited, so a reader sees the old one or the new one. It says what was started, not what works: that
the service itself says.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import psutil

from specwire.law.errors import CallerFault

VERSION = 2
WHERE = "SPECWIRE_STATE says where the state of services is kept"
CANNOT_WRITE = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.EFBIG, errno.EIO}
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
"""Another number after each start of the machine. On Linux only."""


class StateError(CallerFault):
    """Something runs already, or nothing does, or the file is not ours."""


class NothingRuns(StateError):
    """There is nothing to stop."""


@dataclass(frozen=True, slots=True)
class Process:
    """One operating-system process of ours."""

    name: str
    """coordinator, target-0, draft-0, supervisor or ray."""
    pid: int
    began: str
    """See `_began`; with `pid` it names the process for ever."""
    restarts: int = 0
    """How often it died and was started again."""
    exit: str = ""
    """How the former one of this name ended. Empty: there was none."""

    @classmethod
    def of(cls, name: str, pid: int, restarts: int = 0, exit: str = "") -> Process:
        """The process that has this id now. Raises psutil.NoSuchProcess."""
        return cls(name, pid, _began(pid), restarts, exit)

    def find(self) -> psutil.Process | None:
        """The living process, or None when it is gone, a zombie, or another one has its id."""
        try:
            process = psutil.Process(self.pid)
            same = _began(self.pid) == self.began
            return process if same and process.status() != psutil.STATUS_ZOMBIE else None
        except psutil.Error:
            return None

    @property
    def alive(self) -> bool:
        """Whether it still runs."""
        return self.find() is not None


def _began(pid: int) -> str:
    """When a process began. On Linux the machine's boot and clock ticks since then: seconds since 1970 are derived from them and
    change for a process that lives when the clock is set, as after a pause of a virtual machine. Elsewhere those seconds. Raises
    psutil.NoSuchProcess."""
    if not BOOT_ID.exists():
        return f"{psutil.Process(pid).create_time():.1f}"
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        raise psutil.NoSuchProcess(pid) from None
    ticks = stat.rpartition(")")[2].split()[19]  # the name, in brackets, may hold anything
    return f"{BOOT_ID.read_text(encoding='ascii').strip()} {ticks}"


@dataclass(frozen=True, slots=True)
class RayState:
    """Where the actors live."""

    address: str
    """For ray.init."""
    namespace: str
    started: bool
    """We started this Ray, so we stop it."""
    folder: str = ""
    """Its session files, when we started it."""


@dataclass(frozen=True, slots=True)
class Running:
    """One running service, as `up` left it."""

    mode: Literal["processes", "ray"]
    endpoint: str
    """host:port for clients."""
    topology: str
    """Where the topology came from."""
    workers: tuple[str, ...]
    """Names of the workers that were asked for."""
    since: float
    """Seconds since 1970."""
    processes: tuple[Process, ...] = ()
    ray: RayState | None = None

    @property
    def alive(self) -> bool:
        """Whether anything of it still runs. A Ray that somebody else started counts as running."""
        return any(process.alive for process in self.processes) or (self.ray is not None and not self.ray.started)

    def describe(self) -> str:
        """One line for a refusal."""
        names = ", ".join(p.name for p in self.processes if p.alive and p.name != "supervisor") or "its actors"
        return f"{self.topology} at {self.endpoint} ({'Ray' if self.mode == 'ray' else 'plain processes'}: {names})"

    def with_process(self, process: Process) -> Running:
        """The same with the process of this name replaced or added."""
        others = tuple(p for p in self.processes if p.name != process.name)
        return replace(self, processes=(*others, process))


@dataclass(frozen=True)
class StateFolder:
    """The folder that holds the state file, the configurations written by `up`, and the logs."""

    path: Path
    _file: Path = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_file", self.path / "state.json")

    @property
    def logs(self) -> Path:
        """One log per service."""
        return self.path / "logs"

    @property
    def configs(self) -> Path:
        """One configuration per service, as handed to it."""
        return self.path / "configs"

    def log(self, name: str) -> Path:
        """The log of a service."""
        return self.logs / f"{name}.log"

    def prepare(self) -> None:
        """Makes the folders. Others may not read them: logs can hold request ids and addresses."""
        for folder in (self.path, self.logs, self.configs):
            try:
                folder.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise StateError(f"{folder}: cannot be made ({error.strerror}); {WHERE}") from None
        with contextlib.suppress(OSError):
            self.path.chmod(0o700)

    def read(self) -> Running | None:
        """What `up` left, whether or not it still lives. Raises StateError when the file is not ours."""
        try:
            data = json.loads(self._file.read_text())
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            raise StateError(f"{self._file}: cannot be read ({error}); remove it if nothing runs") from None
        return _running(data, self._file)

    def write(self, running: Running) -> None:
        """Replaces the file."""
        fresh = self._file.with_suffix(f".{os.getpid()}.tmp")
        fresh.write_text(json.dumps({"version": VERSION, **asdict(running)}, indent=1))
        fresh.replace(self._file)

    def clear(self) -> None:
        """Nothing runs any more."""
        self._file.unlink(missing_ok=True)

    @contextlib.contextmanager
    def exclusively(self) -> Iterator[None]:
        """Held by `up` and `down`, so that two of them do not meet. Raises StateError at once when another holds it, and where the
        folder cannot be written: a full disk does not say which one it is."""
        self.prepare()
        with (self.path / "lock").open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise StateError(f"another `specwire up` or `down` is at work in {self.path}") from None
            try:
                yield
            except OSError as error:
                where = Path(error.filename or self.path)
                if error.errno not in CANNOT_WRITE or not where.is_relative_to(self.path):
                    raise
                raise StateError(f"{where}: {error.strerror}; {WHERE}") from None


def folder() -> StateFolder:
    """The folder in force: SPECWIRE_STATE, else the user's state folder."""
    if chosen := os.environ.get("SPECWIRE_STATE"):
        return StateFolder(Path(chosen).expanduser().absolute())
    import platformdirs

    return StateFolder(Path(platformdirs.user_state_dir("specwire", appauthor=False)))


def _running(data: Any, source: Path) -> Running:
    try:
        if data.pop("version") != VERSION:
            raise StateError(f"{source}: written by another version; run its `specwire down`, or remove the file")
        ray = data.pop("ray")
        return Running(
            processes=tuple(Process(**each) for each in data.pop("processes")),
            ray=None if ray is None else RayState(**ray),
            workers=tuple(data.pop("workers")),
            **data,
        )
    except (AttributeError, KeyError, TypeError) as error:
        raise StateError(f"{source}: not a state file ({error}); remove it if nothing runs") from None
