"""LiveCodeBench's private tests: base64 of zlib of a pickle of one text, which is JSON.

Its own code unpickles (lcb_runner/benchmarks/code_generation.py), and a pickle may run anything. Nothing is unpickled
here: the pickle's instructions are read, and where they are others than those that make one text, it is refused.
"""

from __future__ import annotations

import base64
import binascii
import pickletools
import zlib

from megasharp.errors import UserError

# A problem's tests, unpacked. The largest are tens of megabytes; a bomb would be any size.
MAX_BYTES = 1 << 30
_TEXTS = {"SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8", "UNICODE"}
_HARMLESS = {"PROTO", "FRAME", "MEMOIZE", "PUT", "BINPUT", "LONG_BINPUT", "STOP"}


def decoded(text: str, where: str, limit: int = MAX_BYTES) -> str:
    """The JSON text in an encoded field.

    Raises UserError, naming `where`: not base64 or zlib, more than `limit` bytes, or a pickle of more than one text.
    """
    try:
        unpacker = zlib.decompressobj()
        packed = base64.b64decode(text, validate=True)
        pickled = unpacker.decompress(packed, limit)
    except (binascii.Error, zlib.error, ValueError) as error:
        raise UserError(f"{where}: neither JSON nor base64 of zlib ({error})") from error
    if not unpacker.eof:
        raise UserError(f"{where}: more than {limit} bytes, or cut off")
    return _only_text(pickled, where)


def _only_text(pickled: bytes, where: str) -> str:
    texts: list[str] = []
    try:
        for operation, argument, _ in pickletools.genops(pickled):
            if operation.name in _TEXTS:
                texts.append(str(argument))
            elif operation.name not in _HARMLESS:
                raise UserError(f"{where}: a pickle that does more than hold a text ({operation.name}); refused")
    except ValueError as error:
        raise UserError(f"{where}: not a pickle of a text ({error})") from error
    if len(texts) != 1:
        raise UserError(f"{where}: a pickle of {len(texts)} texts, where one was expected")
    return texts[0]
