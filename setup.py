"""The compiled twins; every static fact about the project is in setup.cfg.

The same source that Python interprets is compiled under another name, with the C types of a .pxd beside it. Sources that call each other
for each record are compiled into one module. Where there is no C compiler the extensions are left out, and the package works all the
same, slower.
"""

import ast
import os
import tempfile
from glob import glob
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError

STEMS = {
    "kvspool": ("chunks", "fflg", "fixed", "frames", "group", "kvj", "lock", "sej", "tail", "wakeups"),
    "shard": ("hash", "merge"),
}
PARTS = {  # of a module: further sources, each one after those that it imports
    "frames": ("ring", "reader", "batch", "end", "writer", "single", "scanner"),
    "merge": ("following",),
}


def twin(package: str, stem: str) -> Extension:
    """Return the extension that compiles `stem`_py.py of a package's kernel, and its parts, to `stem`_c."""
    return Extension(
        f"{package}.kernel.{stem}_c",
        [f"{package}/kernel/{part}_py.py" for part in (stem, *PARTS.get(stem, ()))],
        include_dirs=["kvspool/kernel"],
        depends=[f"{package}/kernel/{stem}_c.pxd", *glob("kvspool/kernel/*.pxd"), *glob("kvspool/kernel/*.h")],
        extra_compile_args=["-O3", "-g0"],  # a quarter of the time goes into what a debugger would want
        optional=True,
    )


def joined(sources: list[str]) -> str:
    """Return the path of one source with the statements of all, without their imports of each other."""
    if len(sources) == 1:
        return sources[0]
    own = {source.removesuffix(".py").replace("/", ".") for source in sources}
    statements = [
        statement
        for source in sources
        for statement in ast.parse(Path(source).read_bytes(), source).body
        if not (isinstance(statement, ast.ImportFrom) and statement.module in {*own, "__future__"})
    ]
    directives = [line for line in Path(sources[0]).read_text(encoding="utf-8").splitlines() if line.startswith("# cython:")]
    lines = [*directives, "from __future__ import annotations", ast.unparse(ast.Module(statements, []))]
    path = Path("build", sources[0])
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines), encoding="utf-8")
    return str(path)


class BuildTwins(build_ext):
    """Makes the C, and compiles it, on all processors. pip runs this file several times before it builds anything."""

    def initialize_options(self) -> None:
        super().initialize_options()
        self.parallel = os.cpu_count()

    def can_compile(self) -> bool:
        """Return whether the C compiler works with Python's headers."""
        with tempfile.TemporaryDirectory() as folder:
            source = Path(folder, "probe.c")
            source.write_text("#include <Python.h>\n", encoding="utf-8")
            try:
                self.compiler.compile([str(source)], output_dir=folder)
            except CompileError as error:
                self.warn(f"no C compiler, so no compiled twins: {error}")
                return False
        return True

    def build_extensions(self) -> None:
        if not self.can_compile():
            return
        from Cython.Build import cythonize

        made = cythonize(
            [Extension(extension.name, [joined(extension.sources)], depends=extension.depends) for extension in self.extensions],
            build_dir="build",
            include_path=["."],  # of the .pxd of joined sources, which are in `build`
            force=True,  # it doesn't see that a .pxd under the other name has changed
            nthreads=self.parallel,
            compiler_directives={
                "language_level": 3,
                "annotation_typing": False,  # the types are those of the .pxd
                "boundscheck": False,  # every offset is checked in the algorithm, against copied values
                "wraparound": False,
                "cdivision": True,
                "embedsignature": True,
            },
        )
        for extension, with_c in zip(self.extensions, made, strict=True):
            extension.sources = with_c.sources
        super().build_extensions()


extensions = [twin(package, stem) for package, stems in STEMS.items() for stem in stems]
setup(ext_modules=extensions, cmdclass={"build_ext": BuildTwins})
