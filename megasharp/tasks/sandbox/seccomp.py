"""The filter of system calls that programs run under: what reaches past namespaces, or takes memory past the limits.

It is classic BPF, which the kernel runs at each call, and only `inside.py` installs it. What no program needs is
denied with EPERM, and what a kernel has that is newer than this table with ENOSYS, as a library expects of an older
kernel; so are calls by another numbering (i386, x32, 32-bit ARM), in which each of these has a second number.
"""

from __future__ import annotations

import errno
import os
import socket
import struct
from dataclasses import dataclass
from functools import cache

# The numbers on x86_64 and on aarch64, which has no call for some.
_DENIED: dict[str, tuple[int, int | None]] = {
    # Keys of the kernel, which are a user's and no namespace's.
    "keyctl": (250, 219),
    "add_key": (248, 217),
    "request_key": (249, 218),
    # Other processes.
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "process_madvise": (440, 440),
    "kcmp": (312, 272),
    "pidfd_getfd": (438, 438),
    # File systems, and namespaces of a program's own, in which it would be root.
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fspick": (433, 433),
    "mount_setattr": (442, 442),
    "unshare": (272, 97),
    "setns": (308, 268),
    "name_to_handle_at": (303, 264),
    "open_by_handle_at": (304, 265),
    # Large parts of the kernel that programs do not need, and in which ways out are found.
    "perf_event_open": (298, 241),
    "bpf": (321, 280),
    "userfaultfd": (323, 282),
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "io_setup": (206, 0),
    "personality": (135, 92),
    "modify_ldt": (154, None),
    "uselib": (134, None),
    "lookup_dcookie": (212, 18),
    "nfsservctl": (180, 42),
    # The machine.
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "delete_module": (176, 106),
    "kexec_load": (246, 104),
    "kexec_file_load": (320, 294),
    "reboot": (169, 142),
    "swapon": (167, 224),
    "swapoff": (168, 225),
    "acct": (163, 89),
    "quotactl": (179, 60),
    "quotactl_fd": (443, 443),
    "syslog": (103, 116),
    "iopl": (172, None),
    "ioperm": (173, None),
    "vhangup": (153, 58),
    # Memory that no limit on address space counts: it need not be mapped, or outlives its mapping.
    "shmget": (29, 194),
    "semget": (64, 190),
    "msgget": (68, 186),
    "mq_open": (240, 180),
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "vmsplice": (278, 75),
    "inotify_init": (253, None),
    "inotify_init1": (294, 26),
    "fanotify_init": (300, 262),
    "setxattr": (188, 5),
    "lsetxattr": (189, 6),
    "fsetxattr": (190, 7),
    "setxattrat": (463, 463),
}
# The first number after Linux 6.18's, from 424 on the same everywhere; x32's are above it too.
_NEWER = 470
_CLONE3 = 435
# CLONE_NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID and NEWNET.
CLONE_NEWUSER = 0x10000000
_NAMESPACES = 0x7E020000
# Both put characters into a terminal's input.
TIOCSTI, _TIOCLINUX = 0x5412, 0x541C
# SO_SNDBUF, SO_SNDBUFFORCE, SO_ATTACH_FILTER and SO_ATTACH_REUSEPORT_CBPF.
_SOCKET_OPTIONS = (7, 32, 26, 51)

# Instructions of linux/bpf_common.h, and where struct seccomp_data has a call's number, its numbering and arguments.
_LOAD, _EQUAL, _NOT_LESS, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_NUMBER, _NUMBERING, _ARGUMENTS = 0, 4, 16
_ALLOW, _ERROR = 0x7FFF0000, 0x00050000


@dataclass(frozen=True, slots=True)
class Machine:
    """A machine's numbering: AUDIT_ARCH of linux/audit.h, its column of the table, and calls that are looked into."""

    numbering: int
    column: int
    keyctl: int
    clone: int
    ioctl: int
    socket: int
    socketpair: int
    setsockopt: int

    def denied(self) -> dict[str, int]:
        """Return the number of each call that is denied whatever its arguments are."""
        numbers = {name: row[self.column] for name, row in _DENIED.items()}
        return {name: number for name, number in numbers.items() if number is not None}


_MACHINES = {
    "x86_64": Machine(0xC000003E, 0, keyctl=250, clone=56, ioctl=16, socket=41, socketpair=53, setsockopt=54),
    "aarch64": Machine(0xC00000B7, 1, keyctl=219, clone=220, ioctl=29, socket=198, socketpair=199, setsockopt=208),
}


def this_machine() -> Machine | None:
    """The numbering here; None where it is in no table."""
    return _MACHINES.get(os.uname().machine)


# An instruction's code and value, and the labels to go on at where a comparison holds and where not.
_Line = tuple[int, int, str, str]


@cache
def assemble(machine: Machine) -> bytes:
    """Return the filter as the kernel takes it, an array of struct sock_filter."""
    lines: list[_Line | str] = [
        (_LOAD, _NUMBERING, "", ""),
        (_EQUAL, machine.numbering, "", "unknown"),
        (_LOAD, _NUMBER, "", ""),
        (_NOT_LESS, _NEWER, "unknown", ""),
        # Its flags are in memory, where a filter cannot look: libraries take clone instead.
        (_EQUAL, _CLONE3, "unknown", ""),
        *((_EQUAL, number, "denied", "") for number in machine.denied().values()),
        (_EQUAL, machine.clone, "clone", ""),
        (_EQUAL, machine.ioctl, "ioctl", ""),
        (_EQUAL, machine.socket, "socket", ""),
        (_EQUAL, machine.socketpair, "socket", ""),
        (_EQUAL, machine.setsockopt, "setsockopt", "allowed"),
        "clone",
        (_LOAD, _ARGUMENTS, "", ""),
        (_ANY_BIT, _NAMESPACES, "denied", "allowed"),
        "ioctl",
        (_LOAD, _ARGUMENTS + 8, "", ""),
        (_EQUAL, TIOCSTI, "denied", ""),
        (_EQUAL, _TIOCLINUX, "denied", "allowed"),
        # Some families have no namespaces (vsock reaches a virtual machine's host), or hold much memory (TCP).
        "socket",
        (_LOAD, _ARGUMENTS, "", ""),
        (_EQUAL, socket.AF_UNIX, "allowed", "denied"),
        # Buffers as large as the machine allows, in each of a thousand sockets, and programs in the kernel.
        "setsockopt",
        (_LOAD, _ARGUMENTS + 16, "", ""),
        *((_EQUAL, option, "denied", "") for option in _SOCKET_OPTIONS),
        "allowed",
        (_RETURN, _ALLOW, "", ""),
        "denied",
        (_RETURN, _ERROR | errno.EPERM, "", ""),
        "unknown",
        (_RETURN, _ERROR | errno.ENOSYS, "", ""),
    ]
    return _with_jumps(lines)


def _with_jumps(lines: list[_Line | str]) -> bytes:
    """Turn labels into the number of instructions that a jump leaves out; no label is the next instruction."""
    labels: dict[str, int] = {}
    instructions: list[_Line] = []
    for line in lines:
        if isinstance(line, str):
            labels[line] = len(instructions)
        else:
            instructions.append(line)
    return b"".join(
        struct.pack("=HBBI", code, *(labels.get(label, at + 1) - at - 1 for label in (holds, fails)), value)
        for at, (code, value, holds, fails) in enumerate(instructions)
    )
