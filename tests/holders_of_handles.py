"""Find the handles among the classes of the packages, by their source.

A handle holds a descriptor, a mapping, a lock or a thread, or has `__del__` or `forked`; or it holds another handle, and can be closed or
iterated over.
"""

from __future__ import annotations

import ast
import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kvspool

ROOT = Path(kvspool.__file__).parent.parent
PACKAGES = ("kvspool", "shard", "hub")
MAKERS = {"open", "map", "eventfd", "socket", "private_memory"}
MAKERS |= {"Lock", "RLock", "Condition", "Semaphore", "Event", "Thread", "ThreadPoolExecutor", "mmap", "watcher", "inotify"}
OWNERS = {"port", "os", "threading", "socket", "mmap", "concurrent", "futures", "flight", "system"}


def modules() -> Iterator[str]:
    """Yield the name of every module of the packages that runs as Python source."""
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            if path.name != "__main__.py":
                yield ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


class Found:
    """A class in a source file: what its attributes are made of."""

    def __init__(self, module: str, node: ast.ClassDef) -> None:
        self.module, self.name = module, node.name
        self.bases = {one for base in node.bases for one in names(base)}
        methods = {one.name for one in node.body if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef)}
        self.is_plain = bool(self.bases & {"Protocol", "NamedTuple", "Struct", "Exception"})
        self.holds = bool(methods & {"__del__", "forked"}) and not self.is_plain
        self.is_used = bool(methods & {"close", "__exit__", "__next__", "__anext__"})
        self.parts: set[str] = set()
        for method in (one for one in node.body if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef)):
            annotations = {one.arg: names(one.annotation) for one in [*method.args.args, *method.args.kwonlyargs] if one.annotation}
            for target, value in stores(method):
                self.holds = self.holds or target in ("fd", "_fd", "_fds") or target.endswith("_fd")
                if isinstance(value, ast.Name) and method.name == "__init__":
                    self.parts |= annotations.get(value.id, set())
                for call in (one for one in ast.walk(value) if isinstance(one, ast.Call)):
                    called = call.func
                    if isinstance(called, ast.Attribute) and called.attr in MAKERS and names(called.value) & OWNERS:
                        self.holds = True
                    if value is call:
                        self.parts |= {called.id} if isinstance(called, ast.Name) else names(called)


def names(node: ast.AST | None) -> set[str]:
    """Return every name in an expression, those inside of quoted annotations too."""
    if node is None:
        return set()
    found = {one.id for one in ast.walk(node) if isinstance(one, ast.Name)}
    found |= {one.attr for one in ast.walk(node) if isinstance(one, ast.Attribute)}
    return found


def stores(method: ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[tuple[str, ast.expr]]:
    """Yield attribute and value of every store to an attribute of `self`."""
    for one in ast.walk(method):
        targets = one.targets if isinstance(one, ast.Assign) else [one.target] if isinstance(one, ast.AnnAssign) else []
        for target in targets:
            for part in target.elts if isinstance(target, ast.Tuple) else [target]:
                if isinstance(part, ast.Attribute) and isinstance(part.value, ast.Name) and part.value.id == "self":
                    value = getattr(one, "value", None)
                    if value is not None:
                        yield part.attr, value


def holders() -> dict[str, Found]:
    """Return the classes that hold such a thing themselves, or an object of a class that does, by module and name."""
    found: dict[str, Found] = {}
    for module in modules():
        path = ROOT.joinpath(*module.split("."))
        source = path.with_suffix(".py") if path.with_suffix(".py").exists() else path / "__init__.py"
        for node in ast.walk(ast.parse(source.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                found[f"{module}.{node.name}"] = Found(module, node)
    direct = {name for name, one in found.items() if one.holds}
    while True:
        held = {one.name for one in found.values() if one.holds}
        for one in found.values():
            one.holds = one.holds or (not one.is_plain and bool((one.parts | one.bases) & held))
        if held == {one.name for one in found.values() if one.holds}:
            return {name: one for name, one in found.items() if name in direct or (one.holds and one.is_used)}


def load(one: Found) -> Any:
    """Return the class."""
    return getattr(importlib.import_module(one.module), one.name)
