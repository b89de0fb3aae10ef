"""The cost of importing, and the direction of imports: kvspool <- shard <- hub, and Spark and Arrow only where they are used."""

from __future__ import annotations

import ast
import functools
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import kvspool
from kvspool.opening import logs
from kvspool.spool import format

ROOT = Path(__file__).resolve().parents[1]
HEAVY = ("pyspark", "pyarrow", "numpy", "pandas", "rich", "matplotlib", "cryptography", "starlette", "uvicorn", "prometheus_client")
OF_HUB = """
client/connection client/mirrored_shard client/one_hub client/remote root/columns server/ingest server/ipc server/probe server/read_service
"""
COLUMNS = ("kvspool/arrow.py", "kvspool/engine/batches.py", "kvspool/engine/columns.py")
COLUMNS += ("kvspool/journal/columns.py", "kvspool/journal/gathering.py", "kvspool/spool/gathering.py")
OF_TABLES = "pipeline/appender pipeline/decode pipeline/jsoncolumns tables/delta tables/files tables/iceberg tables/statistics"
ARROW = {*COLUMNS, *(f"hub/{name}.py" for name in (*OF_HUB.split(), *OF_TABLES.split()))}
ABOVE = {
    "kvspool": {"shard", "hub", "pyspark_kvspool", "tools", "tests"},
    "shard": {"hub", "pyspark_kvspool", "tools", "tests"},
    "hub": {"pyspark_kvspool", "tools", "tests"},
    "pyspark_kvspool": {"tools", "tests"},
}


@functools.cache
def imported(source: Path) -> list[tuple[int, str, int]]:
    """Return line, module and level of each import in a file, at any place in it."""
    found = []
    for node in ast.walk(ast.parse(source.read_bytes(), source)):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name, 0) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            found.append((node.lineno, node.module or "", node.level))
    return found


def sources(package: str) -> list[Path]:
    return sorted((ROOT / package).rglob("*.py"))


@pytest.mark.parametrize("package", ["kvspool", "shard", "hub"])
@pytest.mark.parametrize("interpreted", [False, True], ids=["default", "interpreted"])
def test_importing_a_package_imports_nothing_that_only_its_extras_need(package: str, interpreted: bool) -> None:
    code = f"import sys, {package}; print(*sys.modules)"
    environment = {"KVSPOOL_NO_EXTENSIONS": "1"} if interpreted else {}
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, check=True, capture_output=True, text=True)
    modules = done.stdout.split()
    assert package in modules
    assert {name.partition(".")[0] for name in modules}.isdisjoint(HEAVY)
    assert {name.partition(".")[0] for name in modules}.isdisjoint(ABOVE[package])


def test_the_settings_of_a_session_are_had_without_spark() -> None:
    code = "import sys, hub.spark; hub.spark.session_settings(); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True, text=True)
    assert {name.partition(".")[0] for name in done.stdout.split()}.isdisjoint(HEAVY)


@pytest.mark.parametrize("package", list(ABOVE))
def test_imports_go_one_way(package: str) -> None:
    found = sources(package)
    assert found
    upward = [
        f"{source.relative_to(ROOT)}:{line}: {module}"
        for source in found
        for line, module, _ in imported(source)
        if module.partition(".")[0] in ABOVE[package]
    ]
    assert upward == []


@pytest.mark.parametrize("package", list(ABOVE))
def test_imports_are_absolute(package: str) -> None:
    assert [f"{source}:{line}" for source in sources(package) for line, _, level in imported(source) if level] == []


def test_only_the_spark_package_knows_spark_and_only_it_and_a_few_modules_need_arrow_to_be_imported() -> None:
    for package in ABOVE:
        for source in sources(package):
            name = str(source.relative_to(ROOT))
            tree = ast.parse(source.read_bytes(), source)
            top = {alias.name for node in tree.body if isinstance(node, ast.Import) for alias in node.names}
            top |= {node.module or "" for node in tree.body if isinstance(node, ast.ImportFrom)}
            roots = {module.partition(".")[0] for module in top}
            if not name.startswith("hub/spark/"):
                assert "pyspark" not in roots, name
            if name not in ARROW:
                assert "pyarrow" not in roots, name


def test_the_commands_need_no_extra_before_they_use_one() -> None:
    code = "import sys, hub.cli.hub; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True, text=True)
    assert {name.partition(".")[0] for name in done.stdout.split()}.isdisjoint(HEAVY)


# Nothing that isn't used.

UNUSED = "asyncio hashlib inotify_simple logging subprocess tempfile tomllib multiprocessing concurrent socket ssl"


def loaded(code: str) -> set[str]:
    """Return the modules that code imports, its own and those of the interpreter's start left out."""
    program = f"import sys; before = set(sys.modules); {code}; print(*set(sys.modules) - before)"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True, capture_output=True, text=True)
    return set(done.stdout.split())


def test_importing_the_package_alone_imports_no_other_module() -> None:
    assert loaded("import kvspool") == {"kvspool"}
    assert loaded("import kvspool.cli") == {"kvspool", "kvspool.cli"}


USES = {
    "create": "kvspool.create({path!r}, format={kind!r})",
    "create, append": "kvspool.create({path!r}, format={kind!r}).append(b'one')",
    "open": "kvspool.open({path!r})",
    "open, append": "kvspool.open({path!r}).append(b'one')",
    "open, read": "list(kvspool.open({path!r}).read())",
}


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("kind", ["spool", "kvj", "sej"])
def test_a_log_that_is_created_opened_written_or_read_needs_no_module_that_only_others_use(tmp_path: Path, kind: str, use: str) -> None:
    if use.startswith("open"):
        kvspool.create(tmp_path / "log", format=kind).append(b"one")  # type: ignore[call-overload]
    found = loaded(f"import kvspool; {USES[use].format(path=str(tmp_path / 'log'), kind=kind)}")
    room, other = ("spool", "journal") if kind == "spool" else ("journal", "spool")
    assert {f"kvspool.{room}", "msgspec"} <= found
    assert {name.partition(".")[0] for name in found}.isdisjoint(UNUSED.split())
    ours = {name.removeprefix("kvspool.") for name in found if name.startswith("kvspool.")}
    assert {name.partition(".")[0] for name in ours}.isdisjoint({other, "queue", "arrow", "transfer", "cli"})
    assert ours.isdisjoint({"engine.eventloops", "groups.layout", "groups.member"})
    assert ours.isdisjoint({"opening.places", "opening.settings", "opening.v1", "spool.resize"})


ARROW_USES = {
    "spool": "log = kvspool.open({path!r}); log.append_arrow(log.read_arrow().drop_columns(['sequence']))",
    "kvj": "log = kvspool.open({path!r}); log.append_arrow(log.read_arrow().drop_columns(['sequence']))",
    "hub": "from hub.server import ipc, probe; ipc.BatchEncoder(probe.columns.SCHEMA); probe.record(1)",
}


@pytest.mark.parametrize("use", ARROW_USES)
def test_columns_are_read_appended_and_sent_without_pandas(tmp_path: Path, use: str) -> None:
    kvspool.create(tmp_path / "log", format="kvj" if use == "kvj" else "spool").append(b"one", key=b"k")
    found = loaded(f"import kvspool; {ARROW_USES[use].format(path=str(tmp_path / 'log'))}")
    assert "pyarrow" in found
    assert "pandas" not in found


def test_the_name_of_a_spool_s_file_is_the_same_where_it_is_looked_for() -> None:
    assert logs.CONTROL_FILE == format.CONTROL_FILE


def test_every_name_of_the_package_is_there_and_others_are_none() -> None:
    names = "import kvspool; assert set(kvspool.__all__) < set(dir(kvspool)); [getattr(kvspool, name) for name in dir(kvspool)]"
    assert "kvspool.queue.queue" in loaded(f"{names}; kvspool.errors.Closed; kvspool.journal.Retention; kvspool.queue.open")
    with pytest.raises(AttributeError, match="module 'kvspool' has no attribute 'opn'"):
        kvspool.opn  # type: ignore[attr-defined] # noqa: B018


# Ctrl-C.

INTERRUPTED = """
import os, signal, sys
from kvspool.cli import main
left = {nth}

def hook(event, arguments):
    global left
    if event in ("import", "exec", "open"):
        left -= 1
        if left == 0:
            os.kill(os.getpid(), signal.SIGINT)

sys.addaudithook(hook)
sys.exit(main(["create", sys.argv[1]]))
"""


def test_an_interrupt_while_the_command_starts_is_quiet(tmp_path: Path) -> None:
    codes = []
    for nth in (1, 2, 3, *range(10, 5000, 300)):
        program = [sys.executable, "-c", INTERRUPTED.format(nth=nth), str(tmp_path / f"{nth}")]
        done = subprocess.run(program, cwd=ROOT, capture_output=True, text=True)
        codes.append(done.returncode)
        assert done.stderr == "", nth
        if done.returncode == 0:
            break
        assert (done.returncode, done.stdout) == (130, ""), nth
    assert codes[-1] == 0 and codes.count(130) > 4


def test_an_interrupt_from_outside_at_any_time_after_the_first_module_is_quiet(tmp_path: Path) -> None:
    kvspool.create(tmp_path / "log", capacity=4096).close()
    command = [sys.executable, "-m", "kvspool.cli", "tail", "-f", str(tmp_path / "log")]
    for file in (*["msgspec/_core"] * 5, "log/spool.dat"):  # an exception during msgspec's import is fatal
        child = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        while child.poll() is None and file not in Path(f"/proc/{child.pid}/maps").read_text():
            pass
        child.send_signal(signal.SIGINT)  # within its import, perhaps
        out, err = child.communicate(timeout=60)
        assert (child.returncode, out, err) == (130, "", ""), file


SWALLOWED = """
import signal, sys
from kvspool.importing import delayed_interrupts
with delayed_interrupts():
    try:
        import swallows
        while True:
            signal.pause()
    except KeyboardInterrupt:
        print("interrupted", swallows.__name__)
"""
SWALLOWS = """
import signal, weakref
class Dropped: pass
dropped = Dropped()
callback = weakref.ref(dropped, lambda _: signal.raise_signal(signal.SIGINT))
del dropped  # an exception in the callback is printed, and ends there
"""


def test_an_interrupt_that_an_import_would_swallow_is_raised_after_it(tmp_path: Path) -> None:
    (tmp_path / "swallows.py").write_text(SWALLOWS)
    environment = os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{tmp_path}"}
    done = subprocess.run([sys.executable, "-c", SWALLOWED], env=environment, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "interrupted swallows\n", "")


STARTED = """
import signal, threading
from kvspool.importing import delayed_interrupts
wait = threading.Event.wait

def interrupted(self, timeout=None):
    threading.Event.wait = wait
    signal.raise_signal(signal.SIGINT)
    return wait(self, timeout)

threading.Event.wait = interrupted
with delayed_interrupts():
    try:
        threading.Thread(target=int).start()
        print("started")
        while True:
            signal.pause()
    except KeyboardInterrupt:
        print("interrupted")
"""


def test_an_interrupt_while_a_thread_starts_is_raised_after_it() -> None:
    done = subprocess.run([sys.executable, "-c", STARTED], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "started\ninterrupted\n", "")


RESUMED = """
import os, signal, sys
import kvspool
left = {nth}

def hook(event, arguments):
    global left
    if event in ("import", "exec"):
        left -= 1
        if left == 0:
            os.kill(os.getpid(), signal.SIGINT)

sys.addaudithook(hook)
try:
    kvspool.create, kvspool.Spool
except KeyboardInterrupt:
    print("interrupted")
with kvspool.create(sys.argv[1], capacity=4096) as log:
    log.append(b"one")
    print(*log.read_values())
"""


def test_a_program_that_is_interrupted_while_it_imports_may_continue(tmp_path: Path) -> None:
    interrupted = 0
    for nth in (1, 2, 3, *range(10, 3000, 150)):
        program = [sys.executable, "-c", RESUMED.format(nth=nth), str(tmp_path / f"{nth}")]
        done = subprocess.run(program, cwd=ROOT, capture_output=True, text=True)
        assert (done.stderr, done.returncode) == ("", 0), nth
        assert done.stdout.endswith("b'one'\n")
        interrupted += done.stdout.startswith("interrupted")
        if "interrupted" not in done.stdout:
            break
    assert interrupted > 4


AT_ONCE = """
import sys, threading
import kvspool
barrier = threading.Barrier({count})
failures = []

def use(name):
    barrier.wait()
    try:
        getattr(kvspool, name)
    except BaseException as error:
        failures.append(repr(error))

threads = [threading.Thread(target=use, args=(name,)) for name in {names!r}]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
sys.exit("; ".join(failures) or None)
"""


@pytest.mark.parametrize("names", [("create", "Spool"), ("verify", "salvage"), ("Log", "queue", "copy", "Writer"), ("journal", "export")])
def test_threads_may_use_different_names_first_at_once(names: tuple[str, ...]) -> None:
    for _ in range(3):
        program = AT_ONCE.format(count=len(names), names=names)
        done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
        assert (done.returncode, done.stderr) == (0, "")


FIRST_CALLS = """
import sys, threading
import kvspool
barrier = threading.Barrier(4)
failures = []
acts = [
    lambda: kvspool.create(sys.argv[1] + "/spool", capacity=4096).append(b"one"),
    lambda: kvspool.create(sys.argv[1] + "/kvj", format="kvj").append(b"one"),
    lambda: kvspool.queue.create(sys.argv[1] + "/queue").put(b"one"),
    lambda: kvspool.copy,
]

def use(act):
    barrier.wait()
    try:
        act()
    except BaseException as error:
        failures.append(repr(error))

threads = [threading.Thread(target=use, args=(act,)) for act in acts]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
sys.exit("; ".join(failures) or None)
"""


def test_threads_may_use_different_kinds_of_logs_first_at_once(tmp_path: Path) -> None:
    for number in range(3):
        folder = tmp_path / f"{number}"
        folder.mkdir()
        done = subprocess.run([sys.executable, "-c", FIRST_CALLS, str(folder)], cwd=ROOT, capture_output=True, text=True)
        assert (done.returncode, done.stderr) == (0, "")
