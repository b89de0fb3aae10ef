"""The rooms of the package hub: which may import which, without circles; imports of types and late imports count too."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MODULES = {".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path for path in (ROOT / "hub").rglob("*.py")}
MAY_IMPORT = {
    "protocol": set[str](),
    "security": set[str](),
    "root": {"protocol", "security"},
    "client": {"protocol", "security", "root"},
    "server": {"protocol", "security", "root", "client"},  # the probe is a client of its own hub
    "tables": set[str](),
    "spark": {"protocol", "security", "root", "client", "tables"},
    "pipeline": {"root", "spark", "tables"},
    "web": {"protocol"},
    "cli": {"protocol", "security", "root", "client", "server", "tables", "spark", "pipeline", "web"},
}


def imported(module: str) -> Iterator[str]:
    """Yield the modules of the package that a module imports, wherever the import is."""
    for node in ast.walk(ast.parse(MODULES[module].read_bytes())):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            inner = [f"{node.module}.{alias.name}" for alias in node.names]
            names = [name if name in MODULES else str(node.module) for name in inner]
        yield from (name for name in names if name in MODULES and name != module)


IMPORTS = {module: set(imported(module)) for module in MODULES}


def room_of(module: str) -> str:
    """Return the room of a module; nothing for those at the root of the package."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 and MODULES[".".join(parts[:2])].name == "__init__.py" else ""


@pytest.mark.parametrize("room", MAY_IMPORT)
def test_a_room_imports_only_rooms_below_it(room: str) -> None:
    ours = {module: others for module, others in IMPORTS.items() if room_of(module) == room}
    assert ours
    beyond = {(module, other) for module, others in ours.items() for other in others if room_of(other) not in MAY_IMPORT[room] | {room, ""}}
    assert beyond == set()


def test_no_module_imports_itself_through_others() -> None:
    left = {module: set(others) for module, others in IMPORTS.items()}
    while leaves := {module for module, others in left.items() if not others & left.keys()}:
        left = {module: others for module, others in left.items() if module not in leaves}
    assert left == {}


@pytest.mark.parametrize("room", ["client", "spark", "pipeline"])
def test_no_client_reaches_the_server_through_others(room: str) -> None:
    reached, new = set[str](), {module for module in MODULES if room_of(module) == room}
    while new:
        reached |= new
        new = {other for module in new for other in IMPORTS[module]} - reached
    assert {module for module in reached if room_of(module) == "server"} == set()


def test_few_modules_are_in_no_room() -> None:
    assert {room_of(module) for module in MODULES} == {"", *MAY_IMPORT}
    assert len([module for module in MODULES if not room_of(module)]) <= 6
