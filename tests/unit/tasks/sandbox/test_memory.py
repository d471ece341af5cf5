"""What programs that try to take more memory than they may can take, with control groups and without.

A control group measures here what is taken: pages of processes and files, and what the kernel keeps for them.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from cases import each_case
from waiting import HANG_S

from megasharp.tasks.sandbox import cgroup, seccomp
from megasharp.tasks.sandbox.bubblewrap import open_sandbox
from megasharp.tasks.sandbox.cgroup import Group, own_folders
from megasharp.tasks.sandbox.programs import Clock, End, Limits, Ran, Sandbox, run

pytestmark = pytest.mark.long("sandbox")

MEMORY, PROCESSES, SECONDS = 128, 4, 2.0
# /tmp and /dev/shm, the three standard streams, bubblewrap and the interpreter.
BESIDE = 2 * 64 + 3 * 16 + 32
ENOUGH = 4000

BEGIN = f"""
import ctypes, fcntl, mmap, os, select, signal, socket, time
library = ctypes.CDLL(None, use_errno=True)
library.syscall.argtypes, library.syscall.restype = [ctypes.c_long] * 7, ctypes.c_long
library.shmat.restype = library.mmap.restype = ctypes.c_void_p
MB, END = 2**20, time.monotonic() + {SECONDS}
def call(name, *arguments):
    done = library.syscall(NUMBERS[name], *arguments, *[0] * (6 - len(arguments)))
    if done < 0:
        raise OSError(ctypes.get_errno(), name)
    return done
def going():
    return time.monotonic() < END
def fill(end):
    os.set_blocking(end, False)
    try:
        while os.write(end, bytes(65536)):
            pass
    except OSError:
        pass
def larger(one):
    try:
        one.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2**30)
    except OSError:
        pass
"""
FEW = {
    "System V memory": """
while going():
    segment = call("shmget", 0, 32 * MB, 0o1600)
    there = library.shmat(segment, None, 0)
    ctypes.memset(there, 1, 32 * MB)
    library.shmdt(ctypes.c_void_p(there))
""",
    "files without a name": "while going():\n    os.write(os.memfd_create('x'), bytes(8 * MB))",
    "files": """
for folder in ("/tmp", "/dev/shm"):
    try:
        for n in range(99):
            open(f"{folder}/{n}", "wb").write(bytes(8 * MB))
    except OSError:
        pass
""",
    "standard streams": """
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
for stream in range(3):
    try:
        for n in range(99):
            os.pwrite(stream, bytes(MB), n * MB)
    except OSError:
        pass
""",
    "pages that stay in a pipe": """
class Part(ctypes.Structure):
    _fields_ = [("start", ctypes.c_void_p), ("length", ctypes.c_size_t)]
while going():
    _, end = os.pipe()
    start = library.mmap(None, ctypes.c_size_t(34 * MB), 3, 0x22, -1, 0)
    first = -(-start // (2 * MB)) * 2 * MB
    library.madvise(ctypes.c_void_p(first), ctypes.c_size_t(32 * MB), 14)
    for n in range(16):
        ctypes.memset(first + n * 2 * MB, 1, 1)
        call("vmsplice", end, ctypes.addressof(Part(first + n * 2 * MB, 4096)), 1, 0)
    library.munmap(ctypes.c_void_p(start), ctypes.c_size_t(34 * MB))
""",
    "pages of files that are cut off": """
pipes = [os.pipe() for _ in range(28)]
file = os.open("/tmp/x", os.O_RDWR | os.O_CREAT)
for _, end in pipes:
    try:
        fcntl.fcntl(end, fcntl.F_SETPIPE_SZ, MB)
    except OSError:
        pass
    os.set_blocking(end, False)
    os.ftruncate(file, 0)
    os.pwrite(file, bytes(MB), 0)
    os.splice(file, end, MB, offset_src=0)
""",
    "pipes": """
while going():
    _, end = os.pipe()
    try:
        fcntl.fcntl(end, fcntl.F_SETPIPE_SZ, MB)
    except OSError:
        pass
    fill(end)
""",
    "sockets": """
kept = []
for _ in range(2):
    os.fork()
try:
    while True:
        kept.append(socket.socketpair())
        for one in kept[-1]:
            larger(one)
            fill(one.fileno())
except OSError:
    time.sleep(1)
""",
    "sockets on their way": """
ways, _ = socket.socketpair()
while going():
    pair = socket.socketpair()
    for one in pair:
        larger(one)
        fill(one.fileno())
    socket.send_fds(ways, [b"x"], [one.fileno() for one in pair])
    for one in pair:
        one.close()
""",
    "TCP": """
server, kept = socket.create_server(("127.0.0.1", 0)), []
while going():
    client = socket.create_connection(server.getsockname())
    kept.append((client, server.accept()))
    larger(client)
    fill(client.fileno())
""",
    "messages": """
while going():
    queue = call("msgget", 0, 0o1600)
    for _ in range(2):
        library.msgsnd(queue, (1).to_bytes(8, "little") + bytes(8000), 8000, 0o4000)
""",
    "semaphores": "while going():\n    call('semget', 0, 30000, 0o1600)",
    "watches": """
watcher = call("inotify_init1")
for n in range(10**6):
    os.mkdir(f"/tmp/{n}")
    library.inotify_add_watch(watcher, b"/tmp/%d" % n, 0xFFF)
    if not going():
        break
""",
    "attributes": """
open("/tmp/x", "w")
for n in range(10**6):
    os.setxattr("/tmp/x", f"user.{n}", bytes(60000))
    if not going():
        break
""",
    "timers": """
event, timer = (ctypes.c_int * 16)(0, 0, signal.SIGUSR1), ctypes.c_void_p()
while going() and not library.timer_create(time.CLOCK_MONOTONIC, event, ctypes.byref(timer)):
    pass
""",
    "locks": """
file, at = open("/tmp/x", "wb"), 0
while going():
    fcntl.lockf(file, fcntl.LOCK_EX, 1, at := at + 2)
""",
    "terminals": "while going():\n    fill(os.openpty()[0])",
    "words of a command": """
for _ in range(3):
    if os.fork() == 0:
        os.execv("/proc/self/exe", ["python", "-S", "-c", "import time; time.sleep(1)", *["x" * 130000] * 200])
time.sleep(1)
""",
    "threads": """
import threading
def take():
    kept = []
    while True:
        kept.append(bytearray(b"x") * MB)
for _ in range(3):
    threading.Thread(target=take).start()
""",
}
MANY = {
    "each as much as it may": """
for _ in range(2):
    os.fork()
kept = []
try:
    while True:
        kept.append(bytearray(b"x") * (4 * MB))
except MemoryError:
    time.sleep(1)
""",
    "mappings handed on": """
def hand_on():
    kept = []
    try:
        while True:
            kept.append(mmap.mmap(-1, 4 * MB))
            kept[-1].write(b"x" * (4 * MB))
    except OSError:
        pass
    try:
        if os.fork() == 0:
            for each in kept:
                each.close()
            hand_on()
    except OSError:
        pass
    time.sleep(1)
    os._exit(0)
hand_on()
""",
}
EMPTY = {
    "empty files": "for n in range(10**9):\n    os.mknod(f'/tmp/{n}')",
    "short links": "for n in range(10**9):\n    os.symlink('x' * 120, f'/tmp/{n}')",
    "folders": "os.chdir('/tmp')\nwhile True:\n    os.mkdir('d' * 200)\n    os.chdir('d' * 200)",
}


@pytest.fixture(scope="module")
def sandbox() -> Sandbox:
    return replace(open_sandbox("bubblewrap"), limits=Limits(memory_mb=MEMORY, processes=PROCESSES))


@pytest.fixture
def peak(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The most megabytes of each run that is in a group that only measures."""
    measured: list[float] = []
    limited = cgroup.group

    @contextmanager
    def measuring(_: tuple[Path, ...], __: int, processes: int) -> Iterator[Group]:
        with limited(own_folders(), ENOUGH, processes) as made:
            yield made
            files = [made.folders[0] / name for name in ("memory.max_usage_in_bytes", "memory.peak")]
            measured.extend(int(file.read_text()) / 2**20 for file in files if file.exists())

    monkeypatch.setattr(cgroup, "group", measuring)
    return measured


def tried(sandbox: Sandbox, program: str) -> Ran:
    machine = seccomp.this_machine()
    assert machine
    source = f"NUMBERS = {machine.denied()}\n{BEGIN}\n{program}"
    clock = Clock(HANG_S, time.monotonic() + HANG_S)
    return run(sandbox, {"kind": "script", "preamble": "", "source": source}, b"", clock)


@each_case("name", list(FEW))
def test_what_is_in_no_address_space_is_limited_without_groups(sandbox: Sandbox, peak: list[float], name: str) -> None:
    ran = tried(replace(sandbox, groups=()), FEW[name])
    print(f"{name}: {peak[0]:.0f} MB, {ran.complaint or 'no error'}")
    assert ran.end is End.EXITED
    assert peak[0] < MEMORY + BESIDE, ran


@each_case("name", list(MANY))
def test_processes_take_no_more_than_as_often_as_one_without_groups(
    sandbox: Sandbox, peak: list[float], name: str
) -> None:
    tried(replace(sandbox, groups=()), MANY[name])
    print(f"{name}: {peak[0]:.0f} MB")
    assert 2 * MEMORY < peak[0] < PROCESSES * MEMORY + BESIDE


@each_case("name", [*MANY, *EMPTY])
def test_a_group_counts_all_processes_and_what_the_kernel_keeps_for_them(sandbox: Sandbox, name: str) -> None:
    ran = tried(sandbox, {**MANY, **EMPTY}[name])
    assert ran.end is End.MEMORY, ran
