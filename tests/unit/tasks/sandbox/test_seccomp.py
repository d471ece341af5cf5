"""What no program reaches of the kernel: keys, namespaces, other processes, sockets; and what it still may do."""

from __future__ import annotations

import ctypes
import errno
import os
import struct
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from cases import each_case
from waiting import HANG_S

from megasharp.common.errors import UserError
from megasharp.tasks.sandbox import bubblewrap, programs, seccomp
from megasharp.tasks.sandbox.bubblewrap import open_sandbox
from megasharp.tasks.sandbox.programs import Clock, Ran, Sandbox, run
from megasharp.tasks.sandbox.seccomp import Machine, assemble

MACHINES = {0xC000003E: seccomp._MACHINES["x86_64"], 0xC00000B7: seccomp._MACHINES["aarch64"]}
ALLOWED, DENIED, UNKNOWN = 0x7FFF0000, 0x50000 | errno.EPERM, 0x50000 | errno.ENOSYS
RETURN = 0x06


def filtered(machine: Machine, number: int, *arguments: int, numbering: int | None = None) -> int:
    """Run the filter as the kernel does."""
    given = [*arguments, *[0] * (6 - len(arguments))]
    call = struct.pack("<IIQ6Q", number, machine.numbering if numbering is None else numbering, 0, *given)
    lines = list(struct.iter_unpack("<HBBI", assemble(machine)))
    at = value = 0
    while True:
        code, holds, fails, k = lines[at]
        if code == RETURN:
            return int(k)
        if code == 0x20:
            value, jump = struct.unpack_from("<I", call, k)[0], 0
        else:
            jump = holds if {0x15: value == k, 0x35: value >= k, 0x45: bool(value & k)}[code] else fails
        at += 1 + jump


@each_case("machine", list(seccomp._MACHINES.values()), ids=list(seccomp._MACHINES))
def test_the_filter_knows_each_machines_numbers(machine: Machine) -> None:
    denied = machine.denied()
    assert {"keyctl", "add_key", "perf_event_open", "bpf", "io_uring_setup", "ptrace", "process_vm_readv"} <= set(
        denied
    )
    assert {"mount", "unshare", "userfaultfd", "shmget", "memfd_create"} <= set(denied)
    assert {filtered(machine, number) for number in denied.values()} == {DENIED}
    looked_into = {machine.ioctl, machine.socket, machine.socketpair}
    others = set(range(470)) - set(denied.values()) - looked_into - {435}
    assert {filtered(machine, number) for number in others} == {ALLOWED}
    assert filtered(machine, 435) == filtered(machine, 470) == filtered(machine, 0x40000000 | machine.clone) == UNKNOWN
    assert filtered(machine, 0, numbering=0x40000003) == filtered(machine, 0, numbering=0x40000028) == UNKNOWN
    # A thread of pthread_create's, a process of fork's; of a new user namespace, of a new PID namespace.
    for flags, found in ((0x3D0F00, ALLOWED), (0x1200011, ALLOWED), (0x10000011, DENIED), (0x20000011, DENIED)):
        assert filtered(machine, machine.clone, flags) == found
    for command, found in ((0x5401, ALLOWED), (0x5412, DENIED), (0x541C, DENIED), (1 << 32 | 0x5412, DENIED)):
        assert filtered(machine, machine.ioctl, 0, command) == found
    for family, found in ((1, ALLOWED), (2, DENIED), (10, DENIED), (16, DENIED), (38, DENIED), (40, DENIED)):
        assert filtered(machine, machine.socket, family) == filtered(machine, machine.socketpair, family) == found
    for option, found in ((2, ALLOWED), (7, DENIED), (26, DENIED), (32, DENIED)):
        assert filtered(machine, machine.setsockopt, 3, 1, option) == found


def test_a_machine_whose_calls_are_in_no_table_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bubblewrap, "this_machine", lambda: None)
    monkeypatch.setattr("shutil.which", lambda _: "/usr/bin/bwrap")
    with pytest.raises(UserError, match=r"^reward.sandbox: no filter of system calls is known for .*sandbox=none"):
        open_sandbox("bubblewrap")


@pytest.fixture(scope="module")
def sandbox() -> Sandbox:
    return open_sandbox("bubblewrap")


def tried(sandbox: Sandbox, program: str) -> Ran:
    clock = Clock(HANG_S, time.monotonic() + HANG_S)
    return run(sandbox, {"kind": "script", "preamble": "", "source": program}, b"", clock)


SESSION_KEYRING, JOIN, READ = -3, 1, 11
CALLS = """
import ctypes, os
library = ctypes.CDLL(None, use_errno=True)
library.syscall.argtypes = [ctypes.c_long, *[ctypes.c_void_p] * 6]
def call(number, *arguments):
    done = library.syscall(number, *arguments, *[0] * (6 - len(arguments)))
    return done if done >= 0 else os.strerror(ctypes.get_errno())
"""
LOOK = """
key = call(REQUEST, b"user", b"NAME")
found = ctypes.create_string_buffer(6)
print(call(KEYCTL, 11, key, ctypes.addressof(found), 6) if isinstance(key, int) else key, found.value.decode())
"""
LEAVE = 'print(call(ADD, b"user", b"NAME", b"quokka", 6, -3))\n'


def with_keys(program: str, name: str) -> str:
    machine = seccomp.this_machine()
    assert machine
    numbers = machine.denied()
    for word, call in (("REQUEST", "request_key"), ("KEYCTL", "keyctl"), ("ADD", "add_key")):
        program = program.replace(word, str(numbers[call]))
    return CALLS + program.replace("NAME", name)


@pytest.fixture
def secret() -> Iterator[str]:
    """A key in this process's session keyring, which is a new one: the user's own is left alone."""
    machine = seccomp.this_machine()
    assert machine
    library, name = ctypes.CDLL(None), f"megasharp-test-{os.getpid()}"
    assert library.syscall(machine.keyctl, JOIN, None) > 0
    assert library.syscall(machine.denied()["add_key"], b"user", name.encode(), b"quokka", 6, SESSION_KEYRING) > 0
    yield name
    library.syscall(machine.keyctl, JOIN, None)


def open_filter(machine: Machine) -> bytes:
    return struct.pack("<HBBI", RETURN, 0, 0, ALLOWED)


@pytest.mark.long("sandbox")
def test_a_key_of_the_callers_cannot_be_read(sandbox: Sandbox, secret: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "quokka" in tried(open_sandbox("none"), with_keys(LOOK, secret)).printed.decode()
    assert tried(sandbox, with_keys(LOOK, secret)).printed.decode() == "Operation not permitted \n"
    for file in ("/proc/keys", "/proc/key-users"):
        assert "PermissionError" in tried(sandbox, f"open({file!r})").complaint
    monkeypatch.setattr(programs, "assemble", open_filter)
    assert tried(sandbox, with_keys(LOOK, secret)).printed.decode() == "Required key not available \n", "no filter"


@pytest.mark.long("sandbox")
def test_two_programs_exchange_no_key(sandbox: Sandbox, secret: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name = f"{secret}-note"
    assert tried(sandbox, with_keys(LEAVE, name)).printed.decode() == "Operation not permitted\n"
    monkeypatch.setattr(programs, "assemble", open_filter)
    assert int(tried(sandbox, with_keys(LEAVE + LOOK, name)).printed.split()[0]) > 0, "without the filter"
    assert tried(sandbox, with_keys(LOOK, name)).printed.decode() == "Required key not available \n"


I386 = """
import ctypes, mmap
code = mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
code.write(b"\\xb8\\x14\\x00\\x00\\x00\\xcd\\x80\\xc3")  # mov eax, getpid; int 0x80; ret
print(ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(code)))())
"""


@pytest.mark.long("sandbox")
@each_case(
    ("program", "printed"),
    [
        (CALLS + "print(call(435, b'', 88))", "Function not implemented"),
        (CALLS + "print(call(0x40000000 + 39), call(600))", "Function not implemented Function not implemented"),
        *([(I386, "-38")] if os.uname().machine == "x86_64" else []),
        ("print([line for line in open('/proc/self/status') if line.startswith('CapEff')])", r"['CapEff:\t" + "0" * 16),
        ("print(open('/proc/self/oom_score_adj').read())", "1000"),
        ("import socket\ntry:\n    socket.socket(40)\nexcept OSError as error:\n    print(error)", "[Errno 1] Op"),
    ],
    ids=["clone3", "x32 and what is newer", "i386", "capabilities", "ended first", "vsock"],
)
def test_ways_around_the_filter(sandbox: Sandbox, program: str, printed: str) -> None:
    """Every call that is denied is tried whenever a sandbox is opened."""
    ran = tried(sandbox, program)
    assert ran.printed.decode().startswith(printed), ran


@pytest.mark.long("sandbox")
def test_a_sandbox_without_the_filter_is_refused(sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(programs, "assemble", open_filter)
    with pytest.raises(UserError, match="the system call keyctl is not denied"):
        open_sandbox("bubblewrap")


@pytest.mark.long("sandbox")
def test_the_process_beside_a_program_is_out_of_its_reach(sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    """bubblewrap's own process has the caller's keys and no filter; as root it is another user's already."""
    for place in ("/proc/1/mem", "/proc/self/../1/task/1/mem", "/proc/1/fd", "/proc/1/root", "/proc/1/x"):
        ran = tried(sandbox, f"import os\nos.close(os.open({place!r}, os.O_RDWR | os.O_CREAT))")
        assert "Error" in ran.complaint and ran.code == 1, ran
    at = sandbox.prefix.index("/proc/1")
    bare = (*sandbox.prefix[: at - 5], *sandbox.prefix[at + 3 :])
    monkeypatch.setattr(bubblewrap, "_ways", lambda _: [replace(sandbox, prefix=bare)])
    if os.getuid() == 0:
        open_sandbox("bubblewrap")
    else:
        with pytest.raises(UserError, match="it can write into bubblewrap"):
            open_sandbox("bubblewrap")


MAY = """
import asyncio, ctypes, multiprocessing, os, subprocess, sys, tempfile, threading
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from multiprocessing import shared_memory
import numpy as np

async def later():
    await asyncio.sleep(0)
    return await asyncio.to_thread(abs, -9)

if __name__ == "__main__":
    context = multiprocessing.get_context("fork")
    with context.Pool(2) as pool:
        print(pool.map(abs, range(-3, 1)))
    with ProcessPoolExecutor(2, mp_context=context) as pool, ThreadPoolExecutor(2) as threads:
        print(list(pool.map(abs, [-5])), list(threads.map(abs, [-6])))
    memory = shared_memory.SharedMemory(create=True, size=1 << 20)
    np.ndarray((4,), buffer=memory.buf)[:] = 1
    memory.unlink()
    queue, lock = context.Queue(), context.Lock()
    child = context.Process(target=queue.put, args=("queued",))
    child.start()
    with lock:
        print(queue.get())
    child.join()
    print(asyncio.run(later()), np.linalg.inv(np.eye(300)).sum(), np.random.default_rng(0).normal(size=9).shape)
    print(subprocess.run([sys.executable, "-c", "print('child')"], capture_output=True, text=True).stdout.strip())
    with tempfile.NamedTemporaryFile() as file:
        file.write(b"1")
"""


@pytest.mark.long("sandbox")
def test_processes_threads_numpy_and_shared_memory_work(sandbox: Sandbox) -> None:
    ran = tried(sandbox, MAY)
    wanted = ["[3, 2, 1, 0]", "[5] [6]", "queued", "9 300.0 (9,)", "child"]
    assert ran.printed.decode().splitlines() == wanted, ran


# Where root's home has the Python, an empty one is laid over it that has nothing else.
AS_NOBODY = """
set -e
nobody() { setpriv --reuid=65534 --regid=65534 --clear-groups --bounding-set=-all "$@"; }
mount -t tmpfs none /mnt
mkdir -m 755 /mnt/python /mnt/repository /mnt/packages
mkdir -m 777 /mnt/home
mount --bind "$1" /mnt/python; mount --bind "$2" /mnt/repository; mount --bind "$3" /mnt/packages
if ! nobody test -x "$1/bin/$4"; then
    mount -t tmpfs -o mode=755 none "/$(echo "$1" | cut -d/ -f2)"
    mkdir -p "$1"
    mount --bind /mnt/python "$1"
fi
cd /mnt/repository
export HOME=/mnt/home TMPDIR=/mnt/home PYTHONPATH=/mnt/repository:/mnt/packages
nobody "$1/bin/$4" -B -m pytest -q -x -m long -p no:cacheprovider -k "not ordinary_user" \\
    tests/unit/tasks/sandbox/test_bubblewrap.py tests/unit/tasks/sandbox/test_seccomp.py
"""


@pytest.mark.long("sandbox")
@pytest.mark.skipif(os.getuid() != 0, reason="these tests are run by an ordinary user already")
def test_all_this_holds_for_an_ordinary_user() -> None:
    """It needs a kernel that lets nobody make user namespaces; root's home is out of reach, so that all is mounted."""
    folders = [sys.base_prefix, str(Path(__file__).parents[4]), sysconfig.get_paths()["purelib"]]
    python = Path(os.path.realpath(sys.executable)).name
    command = ["unshare", "--mount", "--propagation", "private", "sh", "-c", AS_NOBODY, "sh", *folders, python]
    ran = subprocess.run(command, capture_output=True, text=True, check=False, timeout=HANG_S)
    assert ran.returncode == 0, ran.stdout[-3000:] + ran.stderr[-3000:]
