"""Check an installed kvspool in a few seconds, with nothing but its requirements: the command, and a log on each twin.

python tools/smoke.py compiled    fails if the compiled twin is missing
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

PROGRAM = """
import sys
import kvspool, hub, shard
from kvspool.kernel.frames import TWIN
for format in ("spool", "kvj"):
    with kvspool.create(format, format=format) as log:
        log.append({"user": 7}, key=b"7", durable=True)
        log.append_many([b"one", b"two"])
        assert [record.sequence for record in log.read()] == [0, 1, 2], list(log.read())
        assert next(log.follow(timeout=5)).data == {"user": 7}
        with log.reader("smoke") as reader:
            assert len(list(reader.read())) == 3
            reader.commit()
    assert kvspool.verify(format).is_sound
print(kvspool.__version__, TWIN, kvspool.__file__)
"""


def main() -> None:
    """Run the checks, and print what was checked."""
    expected = sys.argv[1] if len(sys.argv) > 1 else "compiled"
    for twin in dict.fromkeys((expected, "interpreted")):
        with tempfile.TemporaryDirectory(prefix="kvspool-smoke-") as folder:
            variables = {**os.environ, "KVSPOOL_NO_EXTENSIONS": ""}
            if twin == "interpreted":  # the compiled twin switches the GIL of a free-threaded build on
                variables |= {"KVSPOOL_NO_EXTENSIONS": "1", "PYTHON_GIL": "1"}
            version, found, place = ask([sys.executable, "-c", PROGRAM], folder, variables).split(maxsplit=2)
            if found != twin:
                sys.exit(f"{place}: the twin is {found}, not {twin}")
            command = [sys.executable, "-m", "kvspool.cli"]
            shown = ask([*command, "read", "spool", "--json"], folder, variables)
            if shown.count("\n") != 2 or ask([*command, "--version"], folder, variables) != f"kvspool {version}":
                sys.exit(f"{place}: the command printed\n{shown}")
            print(f"Python {sys.version.split()[0]}: kvspool {version}, {twin}: ok ({Path(place).parent})")


def ask(command: list[str], folder: str, variables: dict[str, str]) -> str:
    """Return a command's output; end with its errors if it fails."""
    done = subprocess.run(command, cwd=folder, env=variables, capture_output=True, encoding="utf-8")
    if done.returncode:
        sys.exit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
    return done.stdout.strip()


if __name__ == "__main__":
    main()
