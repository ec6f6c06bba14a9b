"""A topology is refused with the path, the value and the limit of what is wrong, and says nothing else than it means."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pytest
import yaml

from deploy import configs, lifecycle, topology
from deploy.topology import Topology, TopologyError

TABLE: dict[str, Any] = {"target": {"model": "table"}}


def told(document: object) -> str:
    """What is said of a bad topology."""
    with pytest.raises(TopologyError) as refused:
        topology.parse(document, "my.yaml")
    return str(refused.value)


@pytest.mark.parametrize(
    ("document", "expected"),
    [
        ([], "my.yaml: got list, must be a mapping with at least `target`"),
        ({}, "my.yaml: target: missing"),
        ({"target": {"model": "x", "thread": 1}}, "my.yaml: target.thread: unknown key; did you mean threads?"),
        ({"target": {"model": "x", "qqq": 1}}, "my.yaml: target.qqq: unknown key"),
        (
            {"target": {"model": "x", "threads": -1}},
            "my.yaml: target.threads: got -1, must be greater than or equal to 0",
        ),
        (
            {"target": {"model": "x", "num_gpus": 1.5, "device": "cuda"}},
            "my.yaml: target.num_gpus: got 1.5, must be a fraction below 1 or a whole number",
        ),
        ({"target": {"model": "x", "num_gpus": 1}}, "my.yaml: target.num_gpus: got 1, must be 0 for device 'cpu'"),
        (
            {**TABLE, "strategy": "scatter"},
            "my.yaml: strategy: got 'scatter', must be 'pack', 'spread' or 'strict_spread'",
        ),
        (
            {**TABLE, "coordinator": {"port": 70000}},
            "my.yaml: coordinator.port: got 70000, must be less than or equal to 65535",
        ),
        (
            {**TABLE, "draft": {"model": "table", "host": "0.0.0.0"}},
            "my.yaml: draft.host: got '0.0.0.0', must be loopback (127.0.0.1) unless insecure is true: there is no TLS, "
            "and whoever reaches the port could use the service",
        ),
        (
            {"target": {"model": "x", "table": {"seed": 1}}},
            "my.yaml: target.table: got a table, must be absent unless model is 'table' (it is 'x')",
        ),
        (
            {"target": {"model": "x", "count": 2, "port": 5000}},
            "my.yaml: target.port: got 5000, must be 0 when count is above 1: they cannot share a port",
        ),
    ],
)
def test_refusals_name_path_value_and_limit(document: object, expected: str) -> None:
    """One line says which field, what it holds and what it may hold."""
    assert expected == told(document)


@pytest.mark.parametrize("value", [-1, 65, "often", 1.5])
def test_a_bad_number_of_guesses_is_refused(value: object) -> None:
    """The block length is a number in [0, 64] or auto."""
    said = told({**TABLE, "coordinator": {"speculation": {"num_speculative_tokens": value}}})

    assert said.startswith(
        f"my.yaml: coordinator.speculation.num_speculative_tokens: got {value!r}, must be 'auto', or "
    )


def test_every_fault_has_a_line() -> None:
    """Two mistakes are told at once."""
    said = told({"target": {"model": "x", "threads": -1}, "draft": {"precision": "int4"}})

    assert ["my.yaml: target.threads", "my.yaml: draft.model", "my.yaml: draft.precision"] == [
        line.rsplit(": ", 1)[0].split(": got")[0] for line in said.splitlines()
    ]


def test_zero_guesses_mean_off() -> None:
    """num_speculative_tokens: 0 is plain decoding, and not a division by zero later (report 99)."""
    found = topology.parse({**TABLE, "coordinator": {"speculation": {"num_speculative_tokens": 0}}})

    assert configs.service_configs(found)["coordinator"]["speculation"]["num_speculative_tokens"] == 0


def test_insecure_allows_other_hosts_and_tells_the_services() -> None:
    """Workers on all interfaces announce an address that can be reached, never 0.0.0.0."""
    found = topology.parse({"target": {"model": "table", "host": "0.0.0.0"}, "insecure": True})
    config = configs.service_configs(found)["target-0"]

    assert ("0.0.0.0:0", "127.0.0.1", True) == (config["bind"], config["advertise"], config["insecure"])


def test_topologies_are_frozen() -> None:
    """Measured things are never written back into what was asked for."""
    with pytest.raises(ValueError, match="frozen"):
        topology.parse(TABLE).name = "other"  # type: ignore[misc]


@pytest.mark.parametrize("name", topology.shipped_names())
def test_shipped_topologies_suit_the_services(name: str) -> None:
    """What ships is accepted by the services' own rules."""
    plan = topology.load(Path(name))
    lifecycle.check(plan, configs.service_configs(plan))


def test_the_default_is_the_demo_pair_on_loopback() -> None:
    """Without an argument: coordinator, target and draft on this machine."""
    found = topology.load()

    assert ["coordinator", "target-0", "draft-0"] == list(found.services())
    assert {"127.0.0.1"} == {part.host for part in found.roles().values()}
    assert (8470, "local", "pack", False) == (found.coordinator.port, found.ray.address, found.strategy, found.insecure)


def test_a_file_wins_over_a_shipped_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A name without a suffix means the shipped one unless there is such a file."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "plain").write_text("name: mine\ntarget: {model: table}\n")

    assert "mine" == topology.load(Path("plain")).name


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a: [", "not YAML"),
        ("target: {model: table}\ntarget: {model: demo}", "'target' is there twice"),
        ("\xff", "target: missing"),
        ("- 1", "got list"),
    ],
)
def test_files_that_are_none(tmp_path: Path, text: str, said: str) -> None:
    """Whatever is wrong with the file is one refusal, not a traceback."""
    path = tmp_path / "t.yaml"
    path.write_text(text)

    with pytest.raises(TopologyError, match=said if text != "\xff" else "must be a mapping"):
        topology.load(path)


def test_a_missing_file_names_the_shipped_ones() -> None:
    """Someone who mistyped a shipped name sees which there are."""
    with pytest.raises(TopologyError, match=r"nope: no such file, and none of the shipped ones: default, plain"):
        topology.load(Path("nope"))


def refused_start(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, document: object) -> list[str]:
    """What is said of a topology that was read and cannot be started."""
    monkeypatch.setenv("SPECWIRE_STATE", str(tmp_path))
    with pytest.raises(TopologyError) as refused:
        lifecycle.up(topology.parse(document), "my.yaml", False, 1.0, lambda said: None)
    return str(refused.value).splitlines()


def table(**more: Any) -> dict[str, Any]:
    """A topology whose target has this as well."""
    return {"target": {"model": "table", **more}}


@pytest.mark.parametrize(
    ("document", "expected"),
    [
        (
            table(settings={"token_budget": 9}),
            "target.settings.token_budget: got 9, must be at least 100, four times a block's rows (17) and 8 more",
        ),
        (
            table(settings={"token_budget": 0}),
            "target.settings.token_budget: got 0, must be greater than or equal to 1",
        ),
        (
            table(max_block=300),
            "target.settings.token_budget: got 512, must be at least 1236, four times a block's rows (301) and 8 more",
        ),
        (
            table(count=2, settings={"token_budge": 1}),
            "target.settings.token_budge: unknown key; did you mean token_budget?",
        ),
        (
            table(settings={"model": {"max_block": 9999}}),
            "target.settings.model.max_block: got 9999, must be less than or equal to 4096",
        ),
        (table(settings={"model": {"fussed": 1}}), "target.settings.model.fussed: unknown key; did you mean fused?"),
        (
            table(settings={"model": 3}),
            "target.settings.model: got 3, must be a valid dictionary or instance of ModelConfig",
        ),
        (
            table(settings={"bind": "here"}),
            "target.settings.bind: got 'here', must be host:port with a port in [0, 65535]",
        ),
        (table(table={"vocab_size": 0}), "target.table.vocab_size: got 0, must be in [1, 2^24]"),
        (table(table={"vocab_sise": 9}), "target.table.vocab_sise: unknown key; did you mean vocab_size?"),
        (
            table(table={"faults": [{"kind": "nan", "secnds": 1}]}),
            "target.table.faults.0.secnds: unknown key; did you mean seconds?",
        ),
        (
            {**table(), "draft": {"model": "table", "settings": {"draft_law_top_m": 0}}},
            "draft.settings.draft_law_top_m: got 0, must be greater than or equal to 1",
        ),
        (
            {**table(), "coordinator": {"settings": {"lease_s": -1}}},
            "coordinator.settings.lease_s: got -1, must be greater than 0",
        ),
        (
            {**table(), "coordinator": {"speculation": {"num_speculative_tokens": 9}}},
            "coordinator.speculation.num_speculative_tokens: got 9, must be at most max_num_speculative_tokens (8)",
        ),
        (
            {**table(), "coordinator": {"settings": {"speculation": {"num_speculative_tokens": "x"}}}},
            "coordinator.settings.speculation.num_speculative_tokens: got 'x', must be auto or a whole number in [0, 64]",
        ),
        (
            {**table(), "coordinator": {"settings": {"trace_detail": "all"}}},
            "coordinator.settings.trace_detail: got 'all', must be 'off', 'request' or 'round'",
        ),
        (
            {"target": {"model": "no such"}},
            "target.model: got 'no such', must be demo, demo-draft, table, an existing folder or a hub id (owner/name)",
        ),
        (
            {**table(), "draft": {"model": "table", "tokenizer": "no such"}},
            "draft.tokenizer: got 'no such', must be demo, demo-draft, table, an existing folder or a hub id (owner/name)",
        ),
    ],
)
def test_what_a_service_refuses_is_told_as_a_fault_of_the_file(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, document: object, expected: str
) -> None:
    """Once for all services of a role, with the file and the path in it, before anything starts."""
    assert [f"my.yaml: {expected}"] == refused_start(monkeypatch, tmp_path, document)


def test_faults_of_all_services_are_told_at_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """One line each, in the order in which the services start."""
    document = {
        "coordinator": {"settings": {"lease_s": 0}},
        "target": {"model": "table", "settings": {"hang_s": 0, "metrics_port": -1}},
        "draft": {"model": "table", "settings": {"hang_s": 0}},
    }

    assert [
        "my.yaml: coordinator.settings.lease_s",
        "my.yaml: target.settings.hang_s",
        "my.yaml: target.settings.metrics_port",
        "my.yaml: draft.settings.hang_s",
    ] == [line.split(": got")[0] for line in refused_start(monkeypatch, tmp_path, document)]


def test_a_port_that_is_taken_is_a_fault_of_the_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """It stands there, and can be changed there."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        (line,) = refused_start(monkeypatch, tmp_path, {**table(), "coordinator": {"port": port}})

    assert line.startswith(f"my.yaml: coordinator.port: got {port}, must be a free port of 127.0.0.1: ")


def test_settings_are_merged_into_the_configuration() -> None:
    """A nested setting replaces only itself."""
    document = {"target": {"model": "table", "threads": 2, "settings": {"model": {"max_block": 9}, "linger": False}}}
    config = configs.service_configs(topology.parse(document))["target-0"]

    assert (9, 2, False) == (config["model"]["max_block"], config["model"]["threads"], config["linger"])


def test_models_are_resolved_once_by_name() -> None:
    """The coordinator takes the tokenizer of the target; a draft without embeddings takes the target's."""
    found = configs.service_configs(topology.load(), lambda name: f"/models/{name}")

    assert "/models/demo" == found["coordinator"]["tokenizer"]
    assert ("/models/demo-draft", "/models/demo") == (
        found["draft-0"]["model"]["model"],
        found["draft-0"]["model"]["embeddings_from"],
    )


def test_configurations_survive_yaml() -> None:
    """Services read them from files."""
    found = configs.service_configs(topology.load())

    assert found == yaml.safe_load(yaml.safe_dump(found))


@pytest.mark.parametrize(
    ("target", "draft", "expected"),
    [
        (1, 1, {"target-0": "0", "draft-0": "1"}),
        (0.5, 0.5, {"target-0": "0", "draft-0": "0"}),
        (0.6, 0.5, {"target-0": "0", "draft-0": "1"}),
        (2, 0.5, {"target-0": "0,1", "draft-0": "2"}),
    ],
)
def test_plain_processes_share_the_gpus_out_as_ray_does(target: float, draft: float, expected: dict[str, str]) -> None:
    """Whole GPUs are not shared, fractions are."""
    gpu = {"model": "x", "device": "cuda"}
    found = topology.parse({"target": {**gpu, "num_gpus": target}, "draft": {**gpu, "num_gpus": draft}})

    assert expected == configs.visible_gpus(found)


def test_threads_that_wait_sleep() -> None:
    """The environment of a service keeps idle threads off the cores of others."""
    found = topology.parse({"target": {"model": "table", "threads": 3}})

    expected = {
        "OMP_WAIT_POLICY": "PASSIVE",
        "GOMP_SPINCOUNT": "20000",
        "THP_MEM_ALLOC_ENABLE": "1",
        "PYTHONUNBUFFERED": "1",
        "OMP_NUM_THREADS": "3",
    }
    assert expected == configs.environment(found.target)


def test_a_running_ray_is_told_where_spans_go_but_no_secret() -> None:
    """Ray shows an actor's environment on its dashboard and in its logs."""
    named = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://collector:4317", "OTEL_SERVICE_NAME": "mine"}
    secret = {"OTEL_EXPORTER_OTLP_HEADERS": "key=1", "OTEL_EXPORTER_OTLP_TRACES_HEADERS": "key=2", "HOME": "/root"}

    assert named == configs.telemetry_environment({**named, **secret})


def test_services_start_in_order_and_are_counted() -> None:
    """The coordinator first, then the target, then every draft by number."""
    found: Topology = topology.parse({**TABLE, "draft": {"model": "table", "count": 2}})

    assert ["coordinator", "target-0", "draft-0", "draft-1"] == list(configs.service_configs(found))
