"""The compiled twins; every static fact about the project is in setup.cfg.

The same source that Python interprets is compiled under another name, with the C types of a .pxd beside it. Where there is no C
compiler the extensions are left out, and the package works all the same, slower.
"""

import os
from glob import glob

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

STEMS = {
    "kvspool": ("chunks", "fflg", "fixed", "frames", "group", "kvj", "lock", "sej", "tail", "wakeups"),
    "shard": ("hash", "merge"),
}


def twin(package: str, stem: str) -> Extension:
    """Return the extension that compiles `stem`_py.py of a package's kernel to `stem`_c."""
    return Extension(
        f"{package}.kernel.{stem}_c",
        [f"{package}/kernel/{stem}_py.py"],
        include_dirs=["kvspool/kernel"],
        depends=[f"{package}/kernel/{stem}_c.pxd", *glob("kvspool/kernel/*.pxd"), *glob("kvspool/kernel/*.h")],
        extra_compile_args=["-O3", "-g0"],  # a quarter of the time goes into what a debugger would want
        optional=True,
    )


class BuildTwins(build_ext):
    """Makes the C, and compiles it, on all processors. pip runs this file several times before it builds anything."""

    def initialize_options(self) -> None:
        super().initialize_options()
        self.parallel = os.cpu_count()

    def build_extensions(self) -> None:
        from Cython.Build import cythonize

        made = cythonize(
            [Extension(extension.name, extension.sources, depends=extension.depends) for extension in self.extensions],
            build_dir="build",
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
