"""The code that runs inside of a sandbox, before and around a program; it may import the standard library alone.

Its text is handed to a Python there (`python -c TEXT JOB READY`). It reads its job from one descriptor, gives up what
the program must not have, says on another that it is ready, and only then comes to the program, which may do here what
it likes: no expected output has ever been in this process, and limits cannot be raised again.
"""

from __future__ import annotations

import builtins
import json
import os
import resource
import struct
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any

PASSED, FAILED, PROGRAM_FAILED, CHECK_BROKEN = 0, 10, 11, 12
_NOBODY = 65534
_LENGTH = struct.Struct("!Q")
_PIECE = "<call>"
_CLONE_NEWUSER = 0x10000000
_KEYCTL_JOIN_SESSION_KEYRING = 1
_PR_SET_NO_NEW_PRIVS, _PR_SET_SECCOMP, _SECCOMP_MODE_FILTER = 38, 22, 2
# The third version of its structures, for which this process is 0.
_CAPABILITIES_OF_SELF, _NO_CAPABILITIES = struct.pack("=Ii", 0x20080522, 0), bytes(24)


def main(job_descriptor: int, ready_descriptor: int) -> None:
    """Carry out the job; the process's exit code says how that ended."""
    with open(job_descriptor, "rb") as file:
        job = json.load(file)
    lock = job["lock"]
    if lock:
        _leave_keys(lock["keyctl"])
        # Where memory runs out all the same, the kernel is to end this process and no trainer.
        with suppress(OSError), open("/proc/self/oom_score_adj", "w", encoding="ascii") as file:  # noqa: PTH123
            file.write("1000")
    if job["leave_root"]:
        _leave_root()
    for name, (soft, hard) in job["limits"].items():
        resource.setrlimit(getattr(resource, name), (soft, hard))
    if lock:
        _filter_system_calls(bytes.fromhex(lock["instructions"]))
    sys.path += job["packages"]
    os.write(ready_descriptor, b"+")
    os.close(ready_descriptor)
    {"script": _script, "call": _call, "serve": _serve, "check": _check, "converse": _converse}[job["kind"]](job)


def _leave_keys(keyctl: int) -> None:
    """Join a new session keyring, in which nothing is: a caller's is not of a namespace, and its programs share it.

    Where the kernel has no keys, or lets nobody at them, there is none to leave; the filter denies every use.
    """
    import ctypes

    ctypes.CDLL(None).syscall(ctypes.c_long(keyctl), ctypes.c_long(_KEYCTL_JOIN_SESSION_KEYRING), None)


def _leave_root() -> None:
    """The kernel counts no processes of root's; a user namespace of its own makes the count this sandbox's alone.

    There the process has all capabilities again, until they are dropped.
    """
    import ctypes

    os.setgroups([])
    os.setgid(_NOBODY)
    os.setuid(_NOBODY)
    library = ctypes.CDLL(None)
    library.unshare(_CLONE_NEWUSER)
    library.capset(_CAPABILITIES_OF_SELF, _NO_CAPABILITIES)


def _filter_system_calls(instructions: bytes) -> None:
    """Deny, from here on and for all processes that come from this one, the calls that the filter denies."""
    import ctypes

    array = ctypes.create_string_buffer(instructions, len(instructions))
    program = struct.pack("@HP", len(instructions) // 8, ctypes.addressof(array))
    library = ctypes.CDLL(None, use_errno=True)
    one, none = ctypes.c_ulong(1), ctypes.c_ulong(0)
    if library.prctl(_PR_SET_NO_NEW_PRIVS, one, none, none, none) or library.prctl(
        _PR_SET_SECCOMP, ctypes.c_ulong(_SECCOMP_MODE_FILTER), program
    ):
        raise OSError(ctypes.get_errno(), "the kernel takes no filter of system calls (seccomp)")


def _script(job: dict[str, Any]) -> None:
    sys.argv = ["program.py"]
    _namespace(job, "__main__")


def _call(job: dict[str, Any]) -> None:
    channel = _take_output()
    function = _function(job)
    value = function(*[json.loads(argument) for argument in job["arguments"]])
    with open(channel, "w", encoding="ascii") as file:  # noqa: PTH123
        json.dump(encode(value), file)


def _serve(job: dict[str, Any]) -> None:
    """Call the program's function for another sandbox, which asks on standard input and is answered on output."""
    asked, channel = os.dup(0), _take_output()
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    function = _function(job)
    with open(asked, encoding="ascii") as questions, open(channel, "w", encoding="ascii") as answers:  # noqa: PTH123
        for question in questions:
            arguments, keywords = json.loads(question)
            value = function(*decode(arguments), **decode(keywords))
            print(json.dumps(encode(value)), file=answers, flush=True)


def _check(job: dict[str, Any]) -> None:
    """Run a data set's check of a function that is served by another sandbox: what it gives are plain values.

    An exception of the check before its first question to the function is no fault of the program's.
    """
    answers, channel = os.dup(0), _take_output()
    asked = False
    with open(answers, encoding="ascii") as values, open(channel, "w", encoding="ascii") as questions:  # noqa: PTH123

        def candidate(*arguments: object, **keywords: object) -> object:
            nonlocal asked
            asked = True
            try:
                print(json.dumps([encode(arguments), encode(keywords)]), file=questions, flush=True)
                return decode(json.loads(values.readline()))
            except (OSError, ValueError):
                os._exit(PROGRAM_FAILED)

        try:
            _namespace(job, "__check__")["check"](candidate)
        except BaseException as error:
            if not asked:
                import traceback

                traceback.print_exc()
                os._exit(CHECK_BROKEN)
            if isinstance(error, AssertionError):
                os._exit(FAILED)
            raise
        os._exit(PASSED)


def _converse(job: dict[str, Any]) -> None:
    """Run pieces of code in one namespace, each answered by what it prints and by its last expression's value.

    Standard input is a socket: a length and so many bytes of UTF-8 each way. Random numbers are the same each time.
    """
    import random

    channel = os.dup(0)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    random.seed(0)
    namespace: dict[str, Any] = {"__name__": "__main__"}
    # A process that the code forks is not asked, and does not answer.
    os.register_at_fork(after_in_child=lambda: os.dup2(0, channel))
    with open(channel, "rb") as questions, open(channel, "wb", closefd=False) as answers:  # noqa: PTH123
        while length := questions.read(_LENGTH.size):
            code = questions.read(*_LENGTH.unpack(length)).decode("utf-8", "replace")
            answer = _said_by(code, namespace, job["characters"]).encode("utf-8", "replace")
            answers.write(_LENGTH.pack(len(answer)) + answer)
            answers.flush()


def _said_by(code: str, namespace: dict[str, Any], characters: int) -> str:
    """Run a piece of code, and return the beginning of what it says; an exception is a part of that."""
    import ast
    import io
    import traceback
    from contextlib import redirect_stderr, redirect_stdout

    class Said(io.StringIO):
        def write(self, text: str) -> int:
            super().write(text[: max(0, characters - self.tell())])
            return len(text)

    said = Said()
    with redirect_stdout(said), redirect_stderr(said):
        try:
            tree: Any = compile(code, _PIECE, "exec", ast.PyCF_ONLY_AST)
            last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
            exec(compile(tree, _PIECE, "exec"), namespace)
            if isinstance(last, ast.Expr):
                value = eval(compile(ast.Expression(last.value), _PIECE, "eval"), namespace)
                if value is not None:
                    print(repr(value))
        except BaseException as error:  # all of it is the code's own, exit() too
            frames = error.__traceback__.tb_next if error.__traceback__ else None
            traceback.print_exception(type(error), error, frames)
    return said.getvalue()


def _take_output() -> int:
    """Return a descriptor of the standard output, and send all later output to nowhere."""
    channel = os.dup(1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    return channel


def _namespace(job: dict[str, Any], name: str) -> dict[str, Any]:
    """Run the preamble and the source, and return the names that the source itself defines, imports or assigns.

    The preamble's names are among Python's own: every line finds them, but the source has not defined them. Its `from
    operator import *` has an `add`, by which a program that defines none must not be judged.
    """
    names: dict[str, Any] = {"__name__": name}
    exec(job["preamble"], names)
    given = {each: value for each, value in names.items() if not each.startswith("__")}
    namespace: dict[str, Any] = {"__name__": name, "__builtins__": vars(builtins) | given}
    exec(compile(job["source"], "program.py", "exec"), namespace)
    return namespace


def _function(job: dict[str, Any]) -> Callable[..., object]:
    namespace = _namespace(job, "__program__")
    solution = namespace.get("Solution")
    owner: Any = solution() if isinstance(solution, type) and hasattr(solution, job["function"]) else None
    found: Callable[..., object] = getattr(owner, job["function"]) if owner else namespace[job["function"]]
    return found


def encode(value: Any) -> Any:
    """A plain value as JSON keeps it, tuples, sets and dictionaries with any keys included.

    Raises TypeError for anything else.
    """
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, dict):
        return ["dict", [[encode(key), encode(each)] for key, each in value.items()]]
    for kind in (list, tuple, set, frozenset):
        if isinstance(value, kind):
            return [kind.__name__, [encode(each) for each in value]]
    if isinstance(value, complex):
        return ["complex", [value.real, value.imag]]
    if type(value).__module__ == "numpy":
        return encode(value.tolist())
    raise TypeError(f"a {type(value).__name__} is no plain value")


def decode(value: Any) -> Any:
    """Return the value that `encode` was given. Raises ValueError for anything that `encode` does not make."""
    if not isinstance(value, list):
        return value
    kind, parts = value
    if kind == "dict":
        return {decode(key): decode(each) for key, each in parts}
    if kind == "complex":
        return complex(*parts)
    kinds: dict[str, Callable[[Any], Any]] = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}
    if kind not in kinds:
        raise ValueError(f"no kind of value: {kind}")
    return kinds[kind](decode(part) for part in parts)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
