"""A directory that one program at a time writes to."""

from __future__ import annotations

import fcntl
import os
import socket
import weakref
from contextlib import suppress
from pathlib import Path
from types import TracebackType

ATTEMPTS = 100  # of which each finds the file of a program that has just ended


class DirectoryLock:
    """Within it, no other program has a lock of this directory: neither here nor, where its file system can, on others.

    It is the system's lock of a file ``.lock``, which names process and host, and ends with the process, however that
    ends; processes that are forked meanwhile do not hold it. The file is removed in the end. Entering gives why there
    is no lock, empty if there is one: some file systems have none.

    Args:
        directory: which must be there when it is entered.
        argument: by which the user gave it.

    Raises:
        ValueError: when it is entered: another program, or this one, has such a lock.
    """

    def __init__(self, directory: Path, argument: str) -> None:
        self._directory, self._argument = directory, argument
        self._path = directory / ".lock"
        self._descriptor: int | None = None
        mine = weakref.WeakMethod(self._leave)
        os.register_at_fork(after_in_child=lambda: (leave := mine()) and leave())

    def __enter__(self) -> str:
        try:
            if not any(self._taken() for _ in range(ATTEMPTS)):
                return "the lock's file is another one each time"
        except BlockingIOError:
            raise ValueError(
                f"Another program writes there: {self._holder()}. Received: {self._argument}={str(self._directory)!r}. "
                "Try another directory, or wait for that program to end."
            ) from None
        except OSError as error:
            return error.strerror or str(error)
        with suppress(OSError):  # the disk is full: the lock holds
            os.ftruncate(self._held, 0)
            os.write(self._held, f"process {os.getpid()} on {socket.gethostname()}".encode())
        return ""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._descriptor is not None:
            with suppress(OSError):
                if self._is_named(self._descriptor):
                    self._path.unlink()
            self._leave()

    @property
    def _held(self) -> int:
        assert self._descriptor is not None  # while there is a lock
        return self._descriptor

    def _taken(self) -> bool:
        """Lock the file; whether it still has its name: who held it before may just have removed it."""
        descriptor = self._opened()
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not self._is_named(descriptor):
                os.close(descriptor)
                return False
        except BaseException:
            os.close(descriptor)
            raise
        self._descriptor = descriptor
        return True

    def _opened(self) -> int:
        try:
            return os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)  # some systems lock no others
        except PermissionError:  # another user's, which may be locked, but not written to
            return os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)

    def _is_named(self, descriptor: int) -> bool:
        try:
            return os.path.samestat(os.fstat(descriptor), self._path.stat())
        except FileNotFoundError:
            return False

    def _holder(self) -> str:
        with suppress(OSError):
            return self._path.read_text(encoding="utf-8", errors="replace")[:200] or "it has just begun"
        return "it has just ended"

    def _leave(self) -> None:
        """Close the file; in a process that was forked, the lock stays with the one that took it."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)
