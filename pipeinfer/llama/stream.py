"""A C stream over bytes that Python hands out, so that llama.cpp reads a file that is stored
nowhere.

It uses glibc's `fopencookie`; musl has it, too. Elsewhere `available` is False.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, Protocol

from pipeinfer.llama import binding

_BUFFER = 4 << 20  #: bytes that the stream reads at a time; llama.cpp reads tensor by tensor
_FULLY = 0  #: glibc's and musl's _IOFBF
_POINTER, _SIZE = ctypes.c_void_p, ctypes.c_size_t
_READ = ctypes.CFUNCTYPE(ctypes.c_ssize_t, _POINTER, _POINTER, _SIZE)
_SEEK = ctypes.CFUNCTYPE(ctypes.c_int, _POINTER, ctypes.POINTER(ctypes.c_int64), ctypes.c_int)


class Readable(Protocol):
    """Bytes that can be read at any place. total: how many there are."""

    total: int

    def read_into(self, at: int, into: memoryview) -> int:
        """Fill the beginning of `into` with the bytes from `at` on; return how many, at least 1
        before the end. Raises any exception."""


class _Functions(ctypes.Structure):
    _fields_ = (("read", _READ), ("write", _POINTER), ("seek", _SEEK), ("close", _POINTER))


@cache
def available() -> bool:
    """Return whether this system and this llama.cpp can read from a stream."""
    try:
        return hasattr(ctypes.CDLL(None), "fopencookie") and bool(
            binding.llama_model_load_from_file_ptr)
    except Exception:  # whatever is wrong with the library is reported where it is needed
        return False


class CStream:
    """One open stream. file: the FILE pointer. error: what reading raised."""

    def __init__(self, source: Readable, progress: Callable[[float], object]) -> None:
        self.error: BaseException | None = None
        self._source, self._progress, self._at, self._passed = source, progress, 0, 0
        self._functions = _Functions(_READ(self._read), None, _SEEK(self._seek), None)
        self.file = _libc().fopencookie(None, b"rb", self._functions)
        if not self.file:
            raise OSError("no stream can be opened")
        self._buffer = ctypes.create_string_buffer(_BUFFER)  # glibc's own has 8 KiB, whatever size
        _libc().setvbuf(self.file, self._buffer, _FULLY, _BUFFER)

    def close(self) -> None:
        """Close the stream."""
        file, self.file = self.file, None
        if file:
            _libc().fclose(file)

    def _read(self, _cookie: int | None, buffer: int, size: int) -> int:
        try:
            size = min(size, self._source.total - self._at)
            if size <= 0:
                return 0
            view = memoryview((ctypes.c_char * size).from_address(buffer)).cast("B")
            count = self._source.read_into(self._at, view)
            self._at += count
            self._passed += count  # tensors are read in another order, and some bytes twice
            self._progress(min(1.0, self._passed / self._source.total))
            return count
        except BaseException as error:  # an exception cannot cross C
            self.error = error
            return -1

    def _seek(self, _cookie: int | None, offset: Any, whence: int) -> int:
        begin = (0, self._at, self._source.total)[whence]
        self._at = offset[0] = begin + offset[0]
        return 0 if self._at >= 0 else -1


@contextmanager
def opened(source: Readable, progress: Callable[[float], object]) -> Iterator[CStream]:
    """Open a stream and close it at the end. Raises OSError.

    progress: called with the share that was passed, after each reading; its exception ends that.
    """
    stream = CStream(source, progress)
    try:
        yield stream
    finally:
        stream.close()


@cache
def _libc() -> Any:
    libc = ctypes.CDLL(None)
    libc.fopencookie.restype = _POINTER
    libc.fopencookie.argtypes = [_POINTER, ctypes.c_char_p, _Functions]
    libc.setvbuf.argtypes = [_POINTER, _POINTER, ctypes.c_int, _SIZE]
    libc.fclose.argtypes = [_POINTER]
    return libc
