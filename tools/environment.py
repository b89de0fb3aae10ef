"""Create the .venv for tools/run and tools/test, and find Java for Spark.

It uses only the standard library, in a syntax that Python 3.8 can read: users of an old python3 get a sentence about the missing version,
not a SyntaxError.

A stamp file inside .venv records the set-up, so that a second call costs nothing. A marker next to it means that an installation is in
progress. If the next call finds the marker, that installation was interrupted, and .venv is recreated.
"""

from __future__ import annotations

import configparser
import fcntl
import hashlib
import json
import os
import platform
import queue
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
from collections import deque
from contextlib import ExitStack, contextmanager
from itertools import chain
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
OLDEST = (3, 11)  # of the Pythons that kvspool supports


def _find_home():
    """Return the directory of the environment: .venv, or .venv-3.13 if .venv is that of another Python than the running one.

    Free-threaded builds have the version 3.14t, and never .venv.
    """
    is_free_threaded = bool(sysconfig.get_config_var("Py_GIL_DISABLED"))
    version = "{}.{}{}".format(sys.version_info[0], sys.version_info[1], "t" * is_free_threaded)
    try:
        made = re.search(r"^version(?:_info)? *= *(\d+\.\d+)", (ROOT / ".venv" / "pyvenv.cfg").read_text(), re.MULTILINE)
    except OSError:
        made = None
    is_its_own = (made is None or made.group(1) == version) and not is_free_threaded or sys.version_info < OLDEST
    return ROOT / (".venv" if is_its_own else f".venv-{version}")


HOME = _find_home()
PYTHON = HOME / "bin" / "python"
STAMP = HOME / "kvspool-setup.json"
STAMP_KEYS = {"root", "extras", "metadata", "sources", "suffix", "compiler", "header", "seems_to_compile", "can_compile", "built"}
UNFINISHED = HOME / "kvspool-setup.unfinished"
# Of packages that come without a wheel: pip makes one, and compressing that of PySpark, 450 MB, takes longer than everything else.
STORED = ["--config-settings", "--build-option=--compression=stored"]
PROJECT = ["--no-deps", "--no-build-isolation", "--editable", str(ROOT)]  # pip's arguments; builds the compiled twins

KNOWN_PYTHONS = [f"python3.{minor}" for minor in range(15, 10, -1)]  # commands to look for, if the running Python is too old
JAVA = 17
JAVA_PACKAGE = "openjdk-17-jre-headless"
JRE_MACHINE = "x86_64"  # the only machine for which the extra jre has a Java
PROOF_TOOLS = {"spin": "spin", "chromium": "chromium"}
EXTRACTED_TOOLS = {"promtool": "prometheus"}  # out of packages that would also install a service
EXTRACTED = HOME / "extracted"
APT = threading.Lock()  # apt-get fails while another one runs
HEARTBEAT = 10.0  # seconds without output after which a line shows that the command is still running

# Lines of pip, and their short forms for a waiting user; the first match counts.
SHORT = (
    (r"(?:Downloading|Using cached) \S+\.metadata", ""),
    (r"(?:Downloading|Using cached) (?:\S*/)?(\S+?)(?:-(?:py|cp)\d\S*|\.tar\.gz|\.zip)( \(.*\))?$", r"fetching \1\2"),
    (r"Installing build dependencies: started", "fetching what builds it"),
    (r"Building (?:wheel|editable) for (\S+) .*: started", r"building \1"),
    (r"Building (?:wheel|editable) for (\S+) .*: finished", r"built \1"),
    (r"Installing collected packages: ", "installing the packages, which takes a while"),
    (r"((?:WARNING|ERROR|error): .*)", r"\1"),
)


class SetupError(Exception):
    """Something is missing that can't be installed automatically; the message says what, and how to install it."""


def prepare(extras, *, may_install_compiler=False):
    """Return the path of a Python in .venv that has the project, editable, with `extras` and its compiled twins.

    Takes no time if nothing changed since the last call. Packages of earlier calls stay. Without a C compiler the twins are not built,
    which is reported; with `may_install_compiler`, a compiler is first installed for root on Debian or Ubuntu. Raises SetupError.
    """
    if _is_ready(_stamp(), extras, may_install_compiler):
        return PYTHON
    with _alone() as lock:
        stamp = _stamp()  # perhaps after waiting for another call
        if not _is_ready(stamp, extras, may_install_compiler):
            _set_up(stamp, extras, may_install_compiler, lock)
    return PYTHON


def twins():
    """Return the names of the modules with a compiled twin; each has its declarations in a .pxd."""
    return [f"{path.parent.parent.name}.kernel.{path.stem}" for path in sorted(ROOT.glob("*/kernel/*_c.pxd"))]


def build_requirements():
    """Return the build requirements of the project. Needs Python 3.11."""
    import tomllib

    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["build-system"]["requires"]


def has_compiler():
    """Return whether the last set-up found a working C compiler and the headers of Python."""
    return bool(_stamp().get("can_compile"))


def has_twins():
    """Return whether every compiled twin exists and can be imported."""
    return _is_fine([PYTHON, "-c", f"import {', '.join(twins())}"])


def require_java(*, may_install=False):
    """Return the extras with a Java of at least 17 for Spark: none if JAVA_HOME or the PATH has one, ["jre"] otherwise.

    An unsuitable JAVA_HOME is removed from this process's environment if the PATH has a suitable Java. With `may_install`, a Java is first
    installed for root on Debian or Ubuntu. Raises SetupError if the extra has none for this machine.
    """
    if _has_java():
        return []
    if may_install and _can_apt():
        try:
            _apt_install([JAVA_PACKAGE])
        except SetupError as error:
            _say(str(error))
        if _has_java():
            return []
    found = shutil.which("java")
    missing = f"java on the PATH is not Java {JAVA} or newer ({found})" if found else "there is no java"
    if os.environ.get("JAVA_HOME"):
        missing += f", and JAVA_HOME ({os.environ['JAVA_HOME']}) holds no Java {JAVA} or newer"
    if platform.machine() == JRE_MACHINE:
        _say(f"Spark needs Java {JAVA} or newer, but {missing}: taking the one of the extra jre.")
        return ["jre"]
    raise SetupError(
        f"Spark needs Java {JAVA} or newer, but {missing}. On Debian or Ubuntu: sudo apt-get install {JAVA_PACKAGE}. Elsewhere, install "
        f"a JDK or JRE of version {JAVA} or 21 and set JAVA_HOME to its folder. (Writers run on Linux only, not on macOS or Windows.)"
    )


def use_packaged_java():
    """Make Spark use the Java of the extra `jre`, which `prepare` has installed. Raises SetupError if it does not run."""
    program = "import json; from hub.spark.java import find_java; print(json.dumps(find_java().variables))"
    found = answer([PYTHON, "-c", program])
    if not found:
        raise SetupError(f"the Java of the extra jre does not run here; run {PYTHON} -m hub.spark.java for the reason")
    for name, value in json.loads(found).items():
        os.environ.pop(name, None)
        if value is not None:
            os.environ[name] = value


def install_proof_tools():
    """Install optional tools of some tests, as root on Debian or Ubuntu; report missing ones, without which those tests are skipped."""
    missing = {command: package for command, package in PROOF_TOOLS.items() if shutil.which(command) is None}
    for package in missing.values() if _can_apt() else ():
        try:
            _apt_install([package])  # one by one: Ubuntu's chromium needs snap
        except SetupError as error:
            _say(str(error))
    for command, package in missing.items():
        if shutil.which(command) is None:
            _say(f"There is no {command}: the tests that need it are SKIPPED. On Debian or Ubuntu: sudo apt-get install {package}")


def extract_proof_tools():
    """After `prepare`: put further tools of tests into .venv and on the PATH, as root on Debian or Ubuntu; report missing ones."""
    os.environ["PATH"] = os.pathsep.join((os.environ.get("PATH", os.defpath), str(EXTRACTED)))
    for command, package in EXTRACTED_TOOLS.items():
        if shutil.which(command) is None and _can_apt():
            _say(f"Extracting {command} from Debian's package {package}")
            _apt_extract(package, command)
        if shutil.which(command) is None:
            _say(f"There is no {command}: the tests that need it are SKIPPED. Debian's package {package} has it.")


# Setting up.


def _set_up(stamp, extras, may_install, lock):
    """With the lock held: update .venv for `extras` and the sources."""
    if not sys.platform.startswith("linux"):
        raise SetupError(f"kvspool writes on Linux only; this is {sys.platform}")
    started = time.monotonic()
    if not _is_usable() or stamp.get("root", str(ROOT)) != str(ROOT):
        _make_venv(_find_python())
        stamp = {}
    python = _ask_python()
    can_compile = _can_compile(python, may_install)
    known = stamp.get("extras", [])
    extras = sorted({*extras, *known} & {*_extras()})
    only_twins = stamp.get("metadata") == _metadata() and requirements(extras) == requirements(known)
    UNFINISHED.touch()
    if only_twins:
        _say("Building the compiled twins again.")
        _pip([PROJECT], lock)
    else:
        _say(f"Installing kvspool[{','.join(extras)}] into {HOME}")
        _pip([python["builders"]], lock)
        _pip([["--no-build-isolation", *STORED, *sorted(requirements(extras) | _lines("options", "install_requires"))], PROJECT], lock)
    built = has_twins() or can_compile and _build_in_sight()
    stamp = {
        "root": str(ROOT),
        "extras": extras,
        "metadata": _metadata(),
        "sources": _sources(),
        "suffix": python["suffix"],
        "compiler": python["compiler"],
        "header": python["header"],
        "seems_to_compile": _seems_to_compile(python),
        "can_compile": can_compile,
        "built": built,
    }
    STAMP.write_text(json.dumps(stamp, indent=1))
    UNFINISHED.unlink()
    _say(f"Ready after {time.monotonic() - started:.0f} s: Python {python['version']}, {'compiled' if built else 'interpreted'} twins.")


def _is_ready(stamp, extras, may_install):
    """Return whether the last set-up is still valid: none of its inputs has changed."""
    return (
        stamp.get("root") == str(ROOT)
        and not UNFINISHED.exists()
        and PYTHON.exists()
        and stamp["metadata"] == _metadata()
        and stamp["sources"] == _sources()
        and requirements(extras) <= requirements(stamp["extras"])
        and stamp["seems_to_compile"] == _seems_to_compile(stamp)
        and (_are_twins_built(stamp["suffix"]) if stamp["can_compile"] else not (may_install and _can_apt()))
    )


def _is_usable():
    """Return whether .venv is complete, without an interrupted installation, and has a Python that kvspool supports."""
    if UNFINISHED.exists() or not _is_fine([PYTHON, "-m", "pip", "--version"]):
        return False
    return _version(PYTHON) >= OLDEST


def _stamp():
    """Return the record of the last set-up; empty if there is none, or one of another form."""
    try:
        stamp = json.loads(STAMP.read_text())
    except (OSError, ValueError):
        return {}
    return stamp if stamp.keys() == STAMP_KEYS else {}


@contextmanager
def _alone():
    """Hold a lock against other set-ups in this folder, and yield its descriptor.

    It is a lock on the folder itself, so no file is left. The installing process inherits the descriptor: if this process is killed, the
    lock stays taken until its pip has ended too.
    """
    fd = os.open(ROOT, os.O_RDONLY)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            _say("Another set-up is running in this folder; waiting for its end.")
            fcntl.flock(fd, fcntl.LOCK_EX)
        yield fd
    finally:
        os.close(fd)


# Python.


def _find_python():
    """Return the path of a Python that kvspool supports, the running one first."""
    for candidate in (sys.executable, *map(shutil.which, KNOWN_PYTHONS)):
        if candidate and _version(candidate) >= OLDEST:
            return candidate
    raise SetupError(
        "kvspool needs Python 3.11 or newer; this is {}.{}, and there is no python3.11 to python3.15 on the PATH. "
        "Debian 12 and Ubuntu 24.04 have one: sudo apt-get install python3 python3-venv python3-dev".format(*sys.version_info)
    )


def _version(python):
    """Return (major, minor) of the Python at a path, (0, 0) if it does not run, such as a shim of a missing version."""
    found = answer([python, "-c", "import sys; print(*sys.version_info[:2])"])
    return tuple(map(int, found.split())) if re.fullmatch(r"\d+ \d+\s*", found) else (0, 0)


def _make_venv(python):
    """Recreate .venv, whatever an earlier attempt left."""
    major, minor = _version(python)
    if HOME.exists():
        _say(f"{HOME} is incomplete, or of another folder or Python: recreating it.")
    if not _is_fine([python, "-c", "import ensurepip, venv"]):
        packages = [f"python{major}.{minor}-venv", f"python{major}.{minor}-dev"]
        if not _can_apt():
            raise SetupError(f"{python} comes without venv and pip. On Debian or Ubuntu: sudo apt-get install {' '.join(packages)}")
        _apt_install(packages)
    _say(f"Creating {HOME} with {python} (Python {major}.{minor})")
    old = HOME.with_name(".venv.old")  # moved first: partly deleted, it could look complete
    shutil.rmtree(old, ignore_errors=True)
    if HOME.exists():
        HOME.rename(old)
    HOME.mkdir()
    UNFINISHED.touch()
    shutil.rmtree(old, ignore_errors=True)
    done = subprocess.run([python, "-m", "venv", str(HOME)], stdin=subprocess.DEVNULL)
    if done.returncode or not _is_fine([PYTHON, "-m", "pip", "--version"]):
        raise SetupError(f"{python} -m venv {HOME} failed; its output is above")


def _ask_python():
    """Return properties of .venv's Python: its version, names and compiler of extensions, and the build requirements of the project."""
    program = (
        "import json, sys, sysconfig, tomllib\n"
        "print(json.dumps({'version': '.'.join(map(str, sys.version_info[:3])), 'include': sysconfig.get_path('include'),\n"
        "    'suffix': sysconfig.get_config_var('EXT_SUFFIX'), 'compiler': sysconfig.get_config_var('CC') or 'cc',\n"
        "    'builders': tomllib.load(open(sys.argv[1], 'rb'))['build-system']['requires']}))"
    )
    found = answer([PYTHON, "-c", program, ROOT / "pyproject.toml"])
    if not found:
        raise SetupError(f"{PYTHON} or {ROOT / 'pyproject.toml'} is broken; delete {HOME} and try again")
    known = json.loads(found)
    known["header"] = os.path.join(known["include"], "Python.h")
    return known


# The C compiler and the compiled twins.


def _can_compile(python, may_install):
    """Return whether a C compiler works with Python's headers, and report if not."""
    if _compiles(python):
        return True
    if may_install and _can_apt():
        try:
            _apt_install(["gcc", "libc6-dev", "python{}.{}-dev".format(*python["version"].split("."))])
        except SetupError as error:
            _say(str(error))
        if _compiles(python):
            return True
    command = _compiler(python)
    if shutil.which(command) is None:
        reason = f"there is no C compiler ({command})"
    elif not os.path.exists(python["header"]):
        reason = f"there is no {python['header']}"
    else:
        reason = f"the C compiler ({command}) does not work"
    help = "On Debian or Ubuntu: sudo apt-get install gcc libc6-dev python3-dev"
    _say(f"The compiled twins are not built, because {reason}. Everything works without them, but slower. {help}")
    return False


def _compiles(python):
    command = [*shlex.split(os.environ.get("CC") or python["compiler"]), "-I", python["include"], "-fsyntax-only", "-x", "c", "-"]
    return _seems_to_compile(python) and _is_fine(command, "#include <Python.h>\n")


def _seems_to_compile(python):
    """Return whether compiler and header exist; cheap enough for every call."""
    return shutil.which(_compiler(python)) is not None and os.path.exists(python["header"])


def _compiler(python):
    """Return the program of a compiler command such as "gcc -pthread"; CC in the environment has precedence, as in the build."""
    return shlex.split(os.environ.get("CC") or python["compiler"])[0]


def _build_in_sight():
    """Build the twins once more with the compiler's output, which pip hides. Return whether they work now."""
    _say(f"The C compiler is there, but no working {' and '.join(twins())} was built; retrying with its output:")
    subprocess.run([str(PYTHON), "setup.py", "build_ext", "--inplace"], cwd=str(ROOT), stdin=subprocess.DEVNULL)
    return has_twins()


def _are_twins_built(suffix):
    return all((ROOT / f"{name.replace('.', '/')}{suffix}").exists() for name in twins())


# Inputs of the installation.


def _sources():
    """Return a hash of the sources of the compiled twins."""
    return _hash(path for pattern in ("*/kernel/*.pxd", "*/kernel/*_py.py", "*/kernel/*.h") for path in ROOT.glob(pattern))


def _metadata():
    """Return a hash of the files that determine build and requirements."""
    return _hash(ROOT / name for name in ("setup.cfg", "pyproject.toml", "setup.py"))


def _hash(paths):
    digest = hashlib.sha256()
    for path in sorted(paths):
        content = path.read_bytes()
        digest.update(f"{path.relative_to(ROOT)} {len(content)}\n".encode())
        digest.update(content)
    return digest.hexdigest()


def _extras():
    """Return the names of all extras."""
    return _configuration().options("options.extras_require")


def requirements(extras):
    """Return the requirements of the extras, which may include other extras."""
    return {line for extra in extras for line in _lines("options.extras_require", extra)}


def _lines(section, name):
    """Return the lines of a setting; none if it is missing."""
    return {line for line in _configuration().get(section, name, fallback="").split("\n") if line.strip()}


def _configuration():
    configuration = configparser.ConfigParser()
    configuration.read(ROOT / "setup.cfg")
    return configuration


# Commands.


def _pip(runs, lock):
    """Run `pip install` with each of several lists of arguments, at the same time, and show their progress in short lines.

    Raises SetupError if one fails.
    """
    with ExitStack() as stack:
        processes = [stack.enter_context(_pip_running(arguments, lock)) for arguments in runs]
        outputs = [(process, _follow(process)) for process in processes]
    failed = [lines for process, lines in outputs if process.returncode]
    if failed:
        if not any(line.startswith("Installing collected packages") for lines in failed for line in lines):
            UNFINISHED.unlink()  # nothing was left half changed
        print("".join(line for lines in failed for line in lines[-40:]), file=sys.stderr)
        raise SetupError("pip could not install the project; its last output is above. Check the network, then call again")


@contextmanager
def _pip_running(arguments, lock):
    """Yield a process of `pip install`; end it if the block fails, else wait for its end."""
    command = [str(PYTHON), "-m", "pip", "install", "--disable-pip-version-check", "--no-input", "--progress-bar", "off"]
    command += ["--no-compile", *arguments]  # imported modules, a small part, are compiled on import
    with subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        encoding="utf-8",
        errors="replace",
        pass_fds=(lock,),
    ) as process:
        try:
            yield process
        except BaseException:
            process.terminate()
            raise


def _follow(process):
    """Show the progress of a process of pip until its end, and return its output."""
    lines = []
    for line in _with_heartbeat(process.stdout):
        lines.append(line)
        short = _shorten(line)
        if short:
            print(f"   {short}", flush=True)
    return lines


def _shorten(line):
    """Return the short form of a line of pip for a waiting user, or nothing."""
    for pattern, short in SHORT:
        match = re.match(pattern, line.strip())
        if match:
            return match.expand(short).rstrip()
    return ""


def _with_heartbeat(stream):
    """Yield the lines of a stream; print a sign of progress after a while without any."""
    lines = queue.Queue()
    threading.Thread(target=lambda: deque(map(lines.put, chain(stream, [None])), maxlen=0), daemon=True).start()
    started = time.monotonic()
    while True:
        try:
            line = lines.get(timeout=HEARTBEAT)
        except queue.Empty:
            print(f"   ... {time.monotonic() - started:.0f} s", flush=True)
            continue
        if line is None:
            return
        yield line


def _can_apt():
    """Return whether this process may install Debian packages."""
    return os.geteuid() == 0 and shutil.which("apt-get") is not None


def _apt_install(packages):
    """Install Debian packages, as root. The caller checks the result."""
    _say(f"Installing {' '.join(packages)} with apt-get")
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    with APT:
        for arguments in (["update", "-qq"], ["install", "-qq", "-y", "--no-install-recommends", "-o", "Dpkg::Use-Pty=0", *packages]):
            done = subprocess.run(["apt-get", *arguments], stdin=subprocess.DEVNULL, env=environment)
            if done.returncode:
                raise SetupError(f"apt-get {arguments[0]} failed; its output is above")


def _apt_extract(package, command):
    """Put one command of a Debian package into .venv, without installing the package. The caller checks the result."""
    with APT, tempfile.TemporaryDirectory() as folder:
        downloads = (["update", "-qq"], ["download", "-qq", "-o", "APT::Sandbox::User=root", package])
        if any(subprocess.run(["apt-get", *arguments], cwd=folder, stdin=subprocess.DEVNULL).returncode for arguments in downloads):
            return
        for file in Path(folder).glob("*.deb"):
            subprocess.run(["dpkg-deb", "--extract", str(file), os.path.join(folder, "content")])
        found = Path(folder, "content", "usr", "bin", command)
        if found.is_file():
            EXTRACTED.mkdir(parents=True, exist_ok=True)
            shutil.move(str(found), str(EXTRACTED / command))


def _has_java():
    """Return whether Spark finds a suitable Java. It checks JAVA_HOME first, so an unsuitable one there is removed."""
    home = os.environ.get("JAVA_HOME")
    if home and _java_version(os.path.join(home, "bin", "java")) >= JAVA:
        return True
    if _java_version("java") < JAVA:
        return False
    os.environ.pop("JAVA_HOME", None)
    return True


def _java_version(java):
    """Return the major version of a Java, 0 if there is none: `version "17.0.2"` is 17, `version "1.8.0"` is 8."""
    match = re.search(r'version "(?:1\.)?(\d+)', answer([java, "-version"], stderr=subprocess.STDOUT))
    return int(match.group(1)) if match else 0


def _is_fine(command, text=""):
    """Return whether a command runs and succeeds."""
    try:
        return subprocess.run([str(word) for word in command], input=text.encode(), capture_output=True, cwd=str(ROOT)).returncode == 0
    except OSError:
        return False


def answer(command, stderr=subprocess.DEVNULL):
    """Return a command's output, nothing if it fails or doesn't exist."""
    words = [str(word) for word in command]
    try:
        done = subprocess.run(words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=stderr, encoding="utf-8", errors="replace")
    except OSError:
        return ""
    return "" if done.returncode else done.stdout


def _say(sentence):
    print(sentence, flush=True)
