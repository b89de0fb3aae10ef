"""The system calls that give a thread a host of its own: network, mounts, processes, host name, semaphores and shared memory.

Children of such a thread are processes of the host. Run as a program, this file is process 1 of a host. The kernel kills all other
processes of the host when it ends. It ends when its standard input does, and so with the process that started it, also after SIGKILL.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import signal
import socket
import struct
import sys
import tempfile
from pathlib import Path

KINDS = {"net": 0x40000000, "mnt": 0x00020000, "uts": 0x04000000, "ipc": 0x08000000, "pid": 0x20000000}  # CLONE_NEW..., for unshare
PROCESSES = KINDS["pid"]
MS_BIND, MS_REC, MS_PRIVATE, MNT_DETACH = 4096, 16384, 1 << 18, 2
TUNSETIFF, IFF_TUN, IFF_NO_PI = 0x400454CA, 1, 0x1000
SIOCSIFFLAGS, SIOCSIFADDR, SIOCSIFNETMASK, SIOCSIFMTU = 0x8914, 0x8916, 0x891C, 0x8922
IFF_UP = 1
DEVICE = "eth0"
HOME = "/srv"  # of each host: its own folder

_libc = ctypes.CDLL(None, use_errno=True)


def _call(name: str, *arguments: object) -> None:
    if getattr(_libc, name)(*arguments):
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")


def unshare(flags: int) -> None:
    """Give this thread new namespaces; a new one of processes is that of its later children."""
    _call("unshare", flags)


def enter(pid: int) -> None:
    """Move this process, which has one thread, and its later children into the namespaces of a process."""
    descriptors = {kind: os.open(f"/proc/{pid}/ns/{kind}", os.O_RDONLY) for kind in KINDS}
    for kind, descriptor in descriptors.items():
        _call("setns", descriptor, KINDS[kind])
        os.close(descriptor)


def restart_processes(original: int) -> None:
    """Give the later children of this thread a new namespace of processes; `original` is a descriptor of the first one of all."""
    _call("setns", original, PROCESSES)
    unshare(PROCESSES)


def mount(source: str, target: str, kind: str | None, flags: int = 0) -> None:
    """Mount a file system, or bind a path."""
    _call("mount", source.encode(), target.encode(), kind and kind.encode(), ctypes.c_ulong(flags), None)


def own_mounts(hosts: Path) -> None:
    """Keep later mounts in this namespace, and use a table of hosts and a shared memory of its own.

    A directory of temporary files in the shared memory stays visible. If it is the shared memory itself, all hosts share it.
    """
    mount("none", "/", None, MS_REC | MS_PRIVATE)
    mount(str(hosts), "/etc/hosts", None, MS_BIND)
    temporary = Path(tempfile.gettempdir())
    if temporary == Path("/dev/shm"):
        return
    seen = os.open(temporary, os.O_PATH)
    mount("none", "/dev/shm", "tmpfs")
    if not temporary.is_dir():
        temporary.mkdir(parents=True)
        mount(f"/proc/self/fd/{seen}", str(temporary), None, MS_BIND)
    os.close(seen)


def own_home(home: Path, shared: Path) -> None:
    """Show a host's folder as /srv, and a folder of the whole cluster as /srv/shared, if this machine has a /srv."""
    if Path(HOME).is_dir():
        (home / shared.name).mkdir()
        mount(str(home), HOME, None, MS_BIND)
        mount(str(shared), f"{HOME}/{shared.name}", None, MS_BIND)


def forget_processes() -> None:
    """Unmount the /proc of a namespace whose processes have ended."""
    _call("umount2", b"/proc", MNT_DETACH)


def open_device(address: str, mtu: int) -> int:
    """Create the network device of this thread's namespace, and return the descriptor of the packets that pass through it."""
    device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    name = DEVICE.encode()
    fcntl.ioctl(device, TUNSETIFF, struct.pack("16sH22x", name, IFF_TUN | IFF_NO_PI))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        fcntl.ioctl(control, SIOCSIFFLAGS, struct.pack("16sH22x", b"lo", IFF_UP))
        for request, value in ((SIOCSIFADDR, address), (SIOCSIFNETMASK, "255.255.255.0")):
            fcntl.ioctl(control, request, struct.pack("16sHH4s16x", name, socket.AF_INET, 0, socket.inet_aton(value)))
        fcntl.ioctl(control, SIOCSIFMTU, struct.pack("16si20x", name, mtu))
        fcntl.ioctl(control, SIOCSIFFLAGS, struct.pack("16sH22x", name, IFF_UP))
    return device


def main() -> None:
    """Be process 1 of a host."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # orphans end without a trace
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the command
    mount("none", "/proc", "proc")
    print("ready", flush=True)
    while sys.stdin.buffer.read(1):
        pass


if __name__ == "__main__":
    main()
