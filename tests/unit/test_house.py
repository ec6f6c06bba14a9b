"""The house itself: what is shipped, what importing costs, and that no test folder stands empty."""

from __future__ import annotations

import ast
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
SETUPTOOLS = PROJECT["tool"]["setuptools"]
ROOMS = ("specwire", "coordinator", "target_service", "draft_service", "deploy")


def test_every_package_is_listed() -> None:
    """Packages are listed by name, so a new one must be added or it would be missing from the wheel."""
    found = {
        ".".join(path.parent.relative_to(ROOT).parts)
        for room in ROOMS
        for path in (ROOT / room).rglob("*.py")
        if "__pycache__" not in path.parts
    }

    assert sorted(SETUPTOOLS["packages"]) == sorted(found)


def test_every_package_has_a_head() -> None:
    """A folder without __init__.py imports here and is missing elsewhere."""
    assert [] == [
        name for name in SETUPTOOLS["packages"] if not (ROOT / name.replace(".", "/") / "__init__.py").is_file()
    ]


def test_package_data_is_there() -> None:
    """Every pattern of package data matches something."""
    missing = [
        f"{package}: {pattern}"
        for package, patterns in SETUPTOOLS["package-data"].items()
        for pattern in patterns
        if not any((ROOT / package.replace(".", "/")).glob(pattern))
    ]

    assert [] == missing


def test_no_test_folder_is_empty() -> None:
    """A folder that collects nothing looks like one that passes."""
    folders = [
        path for path in (ROOT / "tests").iterdir() if path.is_dir() and path.name not in ("support", "__pycache__")
    ]
    assert folders

    assert [] == [path.name for path in folders if not any(has_test(file) for file in path.rglob("test_*.py"))]


def test_every_test_file_collects_something() -> None:
    """Nor may a file."""
    assert [] == [str(path.relative_to(ROOT)) for path in (ROOT / "tests").rglob("test_*.py") if not has_test(path)]


def has_test(path: Path) -> bool:
    """Whether pytest would collect something, seen without importing it."""
    tree = ast.parse(path.read_text())
    names = [
        node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
    ]
    # A state machine of hypothesis becomes a test by assignment: TestX = Machine.TestCase.
    names += [
        target.id
        for node in tree.body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    ]
    return any(name.startswith(("test", "Test")) for name in names)


@pytest.mark.parametrize(
    ("module", "heavy"),
    [
        ("specwire", {"torch", "grpc", "numpy", "google.protobuf", "ray"}),
        ("specwire.law", {"torch", "grpc", "google.protobuf", "ray"}),
        ("specwire.client", {"torch", "transformers", "ray"}),
        ("coordinator.serve", {"torch", "transformers", "ray"}),
        ("deploy.lifecycle", {"torch", "transformers", "ray"}),
        ("deploy.cluster", {"torch", "transformers", "ray"}),
    ],
)
def test_importing_a_room_loads_nothing_of_others(module: str, heavy: set[str]) -> None:
    """The law is light, the coordinator computes nothing, and Ray is loaded only when it is used."""
    code = f"import sys, {module}; print(sorted({heavy!r} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)

    assert "[]\n" == done.stdout


def test_ray_is_imported_in_its_files_only() -> None:
    """`actor.py` files and deploy/cluster.py."""
    found = {
        str(path.relative_to(ROOT))
        for room in ROOMS
        for path in (ROOT / room).rglob("*.py")
        if any(name.split(".")[0] == "ray" for node in ast.walk(ast.parse(path.read_text())) for name in imported(node))
    }

    assert found <= {"deploy/cluster.py", "deploy/actor.py", *(f"{room}/actor.py" for room in ROOMS)}


def imported(node: ast.AST) -> list[str]:
    """Modules that a statement imports."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    return [node.module] if isinstance(node, ast.ImportFrom) and node.module and not node.level else []


def test_pinned_versions_lie_in_the_ranges() -> None:
    """What was tested is what is allowed, and every direct dependency is pinned."""
    from packaging.requirements import Requirement
    from packaging.utils import canonicalize_name

    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if line and line[0] != "#"]
    pins = {canonicalize_name(name): version for name, version in (line.split("==") for line in lines)}
    ranges = [
        *PROJECT["project"]["dependencies"],
        *(each for extra in PROJECT["project"]["optional-dependencies"].values() for each in extra),
    ]
    wrong = [
        text
        for text in ranges
        for requirement in [Requirement(text)]
        if not requirement.specifier.contains(pins.get(canonicalize_name(requirement.name), "0"), prereleases=True)
    ]

    assert [] == wrong


@pytest.mark.slow
def test_the_wheel_works_outside_the_checkout(tmp_path: Path) -> None:
    """Built, installed into an environment of its own, and started from elsewhere: the command, its data, its topologies."""
    source = tmp_path / "source"  # building writes beside the source
    for room in ROOMS:
        shutil.copytree(ROOT / room, source / room, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    for command in (
        [sys.executable, "-m", "build", "--wheel", "--outdir", str(tmp_path), str(source)],
        [sys.executable, "-m", "venv", "--system-site-packages", str(tmp_path / "venv")],
    ):
        subprocess.run(command, check=True, capture_output=True)
    wheel = next(tmp_path.glob("specwire-*.whl"))
    python = tmp_path / "venv/bin/python"
    site = subprocess.run(
        [python, "-m", "pip", "install", "--no-deps", "--no-index", "--force-reinstall", str(wheel)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert 0 == site.returncode, site.stderr
    # The dependencies are those of this environment; the packages themselves must come from the wheel.
    code = (
        "import sys, sysconfig; sys.path.append(sys.argv[1])\n"
        "import deploy, specwire, coordinator\n"
        "from deploy import topology\n"
        "from importlib.resources import files\n"
        "print([m.__file__.startswith(sysconfig.get_path('purelib')) for m in (deploy, specwire, coordinator)])\n"
        "print(topology.shipped_names(), len(topology.load().services()))\n"
        "print((files('deploy.models.demo_draft') / 'config.json').is_file(), (files('specwire') / 'py.typed').is_file(), "
        "(files('specwire.lm') / 'c' / 'layers.c').is_file())\n"
    )
    import numpy

    packages = str(Path(numpy.__file__).parents[1])
    done = subprocess.run(
        [python, "-P", "-c", code, packages], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert 0 == done.returncode, done.stderr
    script = subprocess.run(
        [tmp_path / "venv/bin/specwire", "version"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        env={"PYTHONPATH": packages},
    )

    assert [
        "[True, True, True]",
        "['default', 'plain', 'synthetic', 'table', 'two_gpus'] 3",
        "True True True",
    ] == done.stdout.splitlines()
    assert (0, f"specwire {PROJECT['project']['version']}\n") == (script.returncode, script.stdout)
