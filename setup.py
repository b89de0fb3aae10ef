"""The compiled twins, and the description for a package index; every static fact about the project is in setup.cfg.

The same source that Python interprets is compiled under another name, with the C types of a .pxd beside it. Sources that call each other
for each record are compiled into one module. Cython's code for views of memory is in a module of its own, since compiling it takes longer
than most twins. Only modules whose inputs have changed are built again, on all processors.

Where there is no C compiler the extensions are left out, the wheel is one for every platform, and the package works all the same, slower.
With KVSPOOL_REQUIRE_EXTENSIONS=1 in the environment, an extension that can't be built is an error instead.
"""

import ast
import os
import re
import tempfile
from glob import glob
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError

IS_REQUIRED = os.environ.get("KVSPOOL_REQUIRE_EXTENSIONS") == "1"

STEMS = {
    "kvspool": ("chunks", "fflg", "fixed", "frames", "group", "kvj", "lock", "sej", "tail", "tasks", "wakeups"),
    "shard": ("hash", "merge"),
}
PARTS = {  # of a module: further sources, each one after those that it imports
    "frames": ("ring", "reader", "batch", "end", "writer", "single", "scanner"),
    "merge": ("following",),
    "tasks": ("waiting", "taking"),
}
VIEWS = "kvspool.kernel.views_c"  # no twin: Cython's own code, which all twins import
FLAGS = ["-O3", "-g0"]  # a quarter of the time goes into what a debugger would want
LINK = re.compile(r"\[([^\]]+)\]\((?!https?:)([^)#]+)(#[^)]*|)\)")  # in README.md, to a file of the repository


def twin(package: str, stem: str) -> Extension:
    """Return the extension that compiles `stem`_py.py of a package's kernel, and its parts, to `stem`_c."""
    return Extension(
        f"{package}.kernel.{stem}_c",
        [f"{package}/kernel/{part}_py.py" for part in (stem, *PARTS.get(stem, ()))],
        include_dirs=["kvspool/kernel"],
        depends=[f"{package}/kernel/{stem}_c.pxd", *glob("kvspool/kernel/*.pxd"), *glob("kvspool/kernel/*.h")],
        extra_compile_args=FLAGS,
        optional=not IS_REQUIRED,
    )


def c_file(extension: Extension) -> Path:
    """Return the path of an extension's C."""
    if extension.name == VIEWS:
        return Path(extension.sources[0])
    return Path("build", "build" * (len(extension.sources) > 1), extension.sources[0]).with_suffix(".c")


def inputs(extension: Extension) -> list[str]:
    """Return the files that an extension's C is made from."""
    return [] if extension.name == VIEWS else [*extension.sources, *extension.depends]


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


def is_outdated(target: Path, inputs: list[str]) -> bool:
    """Return whether a file is missing, or older than one of its inputs or this file."""
    if not target.exists():
        return True
    made = target.stat().st_mtime_ns
    return any(Path(path).stat().st_mtime_ns > made for path in (*inputs, __file__))


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
        if self.can_compile():
            self.extensions.sort(key=lambda extension: -sum(map(os.path.getsize, inputs(extension))))  # the longest first
            self.make_c()
            self.remove_outdated()
            super().build_extensions()
        elif IS_REQUIRED:
            raise CompileError("KVSPOOL_REQUIRE_EXTENSIONS=1, but the C compiler does not work with Python's headers")
        built = [extension for extension in self.extensions if os.path.exists(self.get_ext_fullpath(extension.name))]
        self.distribution.ext_modules = built

    def make_c(self) -> None:
        """Make the C of each extension, if it is outdated, and let it be the extension's source."""
        outdated = [one for one in self.extensions if is_outdated(c_file(one), inputs(one))]
        if outdated:
            self.cythonize(outdated)
        for extension in self.extensions:
            extension.sources = [str(c_file(extension))]

    def remove_outdated(self) -> None:
        """Remove outdated extensions: if one can't be built, none is better than an old one."""
        for extension in self.extensions:
            path = Path(self.get_ext_fullpath(extension.name))
            if is_outdated(path, [*extension.sources, *extension.depends]):
                path.unlink(missing_ok=True)

    def cythonize(self, extensions: list[Extension]) -> None:
        """Make the C of these extensions."""
        from Cython.Build import cythonize

        twins = [one for one in extensions if one.name != VIEWS]
        cythonize(
            [Extension(twin.name, [joined(twin.sources)], depends=twin.depends) for twin in twins]
            + [Extension(VIEWS, [str(c_file(one).relative_to("build"))]) for one in extensions if one.name == VIEWS],
            build_dir="build",
            shared_utility_qualified_name=VIEWS,
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


class TwinsWheel(bdist_wheel):
    """A wheel for one platform if it has a compiled twin, otherwise for every one."""

    def run_command(self, command: str) -> None:
        super().run_command(command)
        if command == "build":
            self.root_is_pure = not self.distribution.has_ext_modules()


def description() -> str:
    """Return README.md for a package index, which has none of the other files.

    Links lead to the pages of the published site, which tools/docs builds. If setup.cfg names none, they become plain text.
    """
    text = Path("README.md").read_text(encoding="utf-8")
    site = documentation()
    return LINK.sub(lambda link: f"[{link[1]}]({site}/{page(link[2])}{link[3]})" if site else link[1], text)


def documentation() -> str:
    """Return the address `Documentation` of setup.cfg's `project_urls`, or nothing."""
    found = re.search(r"^\s+Documentation *= *(https://\S+?)/?$", Path("setup.cfg").read_text(encoding="utf-8"), re.MULTILINE)
    return found[1] if found else ""


def page(path: str) -> str:
    """Return the page of the site for a Markdown file of the repository."""
    name = path.removeprefix("docs/").removesuffix(".md")
    return "index.html" if name == "README" else f"{name}.html"


twins = [twin(package, stem) for package, stems in STEMS.items() for stem in stems]
views = Extension(VIEWS, [f"build/{VIEWS.replace('.', '/')}.c"], extra_compile_args=FLAGS, optional=not IS_REQUIRED)
setup(
    ext_modules=[*twins, views],
    cmdclass={"bdist_wheel": TwinsWheel, "build_ext": BuildTwins},
    long_description=description(),
    long_description_content_type="text/markdown",
)
