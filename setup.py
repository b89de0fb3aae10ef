"""The compiled twins; every static fact about the project is in setup.cfg.

The same source that Python interprets is compiled under another name, with the C types of a .pxd beside it. Where there is no C
compiler the extensions are left out, and the package works all the same, slower.
"""

from glob import glob

from Cython.Build import cythonize
from setuptools import Extension, setup


def twin(package: str, stem: str) -> Extension:
    """Return the extension that compiles `stem`_py.py of a package to `stem`_c."""
    return Extension(
        f"{package}.{stem}_c",
        [f"{package}/{stem}_py.py"],
        include_dirs=["kvspool"],
        depends=[f"{package}/{stem}_c.pxd", *glob("kvspool/*.pxd"), *glob("kvspool/*.h")],
        extra_compile_args=["-O3"],
    )


STEMS = {
    "kvspool": ("_chunks", "_fflg", "_fixed", "_frames", "_group", "_kvj", "_lock", "_sej", "_tail", "_wakeups"),
    "shard": ("_hash", "_merge"),
}
extensions = cythonize(
    [twin(package, stem) for package, stems in STEMS.items() for stem in stems],
    build_dir="build",
    force=True,  # it doesn't see that a .pxd under the other name has changed
    compiler_directives={
        "language_level": 3,
        "annotation_typing": False,  # the types are those of the .pxd
        "boundscheck": False,  # every offset is checked in the algorithm, against copied values
        "wraparound": False,
        "cdivision": True,
        "embedsignature": True,
    },
)
for extension in extensions:
    extension.optional = True  # cythonize makes new ones, and forgets it

setup(ext_modules=extensions)
