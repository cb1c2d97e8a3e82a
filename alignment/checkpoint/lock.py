"""One writer per output folder: a lock file names the process that writes there, and carries its heartbeat.

The lock is a file because the locks of the operating system do not reach across hosts on every network file system. A
killed run leaves its file behind, so a later run has to find out whether the owner is alive. On the same machine, the
process table shows it. From elsewhere only the heartbeat does: a counter that the owner increments and that an
observer watches by its own clock, because the clocks of two hosts may differ.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import fcntl
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType

from alignment.checkpoint.owner import Owner, Standing, beat
from alignment.config.errors import OutputError

LOCK = ".lock"
HEARTBEAT_S = 5.0
STALE_S = 60.0  # a heartbeat without change for this long has stopped
_POLL_S = 1.0
_LAST_BEAT_S = 5.0  # limit for a write in progress when the lock is released
_SETTLE_S = 0.5  # far longer than another process needs between checking and renaming a stale file
_TURN_S = 5.0
_NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)


def _print(text: str) -> None:
    print(text, flush=True)


class OutputLock:
    """The right to write into a folder; one rank acquires it for the whole run.

    Args:
        folder: the output folder.
        own: the process that acquires the lock; None: the calling one.
        tell: prints a line for the user.
        clock, wait: clock and sleep function of the observer, in seconds.
    """

    def __init__(
        self,
        folder: Path,
        *,
        own: Owner | None = None,
        tell: Callable[[str], None] = _print,
        clock: Callable[[], float] = time.monotonic,
        wait: Callable[[float], None] = time.sleep,
    ) -> None:
        self.folder, self.path = folder, folder / LOCK
        self._own, self._tell, self._clock, self._wait = own or Owner.this_process(), tell, clock, wait
        self._pid = os.getpid()
        self._heartbeat: _Heartbeat | None = None

    def peek(self) -> None:
        """Check whether a process of this machine holds the lock, without changing anything or waiting.

        Raises:
            OutputError: it does, or the folder cannot be read.
        """
        try:
            seen = self._read(self.path)
        except OSError as error:
            raise self._cannot(error) from error
        owner = None if seen is None else Owner.parsed(seen)
        if owner is not None and owner.standing(self._own) is Standing.LIVES:
            raise self._refusal(owner)

    def acquire(self) -> None:
        """Acquire the lock and create the folder; immediately if there is no owner or it is known to be dead.

        If the owner cannot be looked up, or the file is torn after a crash, it is watched for a minute first.

        Raises:
            OutputError: another process holds the lock, or the folder cannot be written.
        """
        if self._heartbeat is not None:
            return
        contested = False
        try:
            while not self._create():
                contested = True
                seen = self._read(self.path)
                if seen is not None and self._is_stale(seen):
                    self._take_away(seen.__eq__)
            if contested:
                # A process of another host may have moved this file away, mistaking it for the stale one.
                self._wait(_SETTLE_S)
                self._confirm()
            for left in self.folder.glob(f"{LOCK}.*"):  # from processes that were killed while acquiring the lock
                left.unlink(missing_ok=True)
        except OSError as error:
            raise self._cannot(error) from error
        atexit.register(self.release)  # for callers that never close the trainer

    def check(self) -> None:
        """Check that the folder still belongs to this run; recreate the file if it was removed.

        A run that was suspended for a minute, by a signal or with its machine, may have been taken for dead.

        An unresponsive file system is only reported: the next write will fail.

        Raises:
            OutputError: another run holds the lock.
        """
        if self._heartbeat is None:
            return
        try:
            self._confirm()
        except OSError as error:
            self._tell(str(self._cannot(error)))

    def release(self) -> None:
        """Release the lock if this process holds it. Repeated calls have no effect."""
        if self._heartbeat is None or os.getpid() != self._pid:  # a fork has the object but not the lock
            return
        atexit.unregister(self.release)
        self._stop()
        try:
            with contextlib.suppress(FileNotFoundError):  # the folder was removed
                self._take_away(self._is_own)
        except OSError as error:
            self._tell(f"output_dir: {self.path} could not be removed: {error.strerror or error}")

    def __enter__(self) -> OutputLock:
        self.acquire()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    # Files ----------------------------------------------------------------------------------------------------------

    def _create(self) -> bool:
        """Create the lock file of this process; return False if one exists."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with self._turn():
            descriptor = self._linked()
        if descriptor is None:
            return False
        self._heartbeat = _Heartbeat(descriptor, len(self._own.text()) - len(beat(0)))
        self._heartbeat.start()
        return True

    def _linked(self) -> int | None:
        """The opened lock file; None if another one exists. It appears atomically, with its content."""
        aside = self._beside("new")
        descriptor = self._written(aside)
        try:
            os.link(aside, self.path)
            return descriptor
        except (FileExistsError, FileNotFoundError):  # there is an owner, which may have removed the other file
            if self._is_own(self._read(self.path) or b""):  # NFS repeated a request that had succeeded
                return descriptor
        except OSError as error:
            if error.errno not in _NO_LINKS:
                os.close(descriptor)
                raise
            os.close(descriptor)
            return self._written_in_place()
        finally:
            aside.unlink(missing_ok=True)
        os.close(descriptor)
        return None

    def _written_in_place(self) -> int | None:
        """Like :meth:`_linked`, on a file system without links; other processes may briefly see an empty file."""
        try:
            return self._written(self.path)
        except FileExistsError:
            return None

    def _written(self, path: Path) -> int:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
        try:
            os.write(descriptor, self._own.text())
            os.fsync(descriptor)
        except BaseException:
            os.close(descriptor)
            path.unlink(missing_ok=True)
            raise
        return descriptor

    def _take_away(self, wanted: Callable[[bytes], bool]) -> None:
        """Remove the lock file if it is the expected one. No process can remove a file that it has not examined."""
        moved = self._beside("old")
        with self._turn():
            if not wanted(self._read(self.path) or b""):
                return
            with contextlib.suppress(FileNotFoundError):
                os.rename(self.path, moved)
            found = self._read(moved)
            if found is not None and not wanted(found):  # replaced between the check and the rename
                self._put_back(moved)
            moved.unlink(missing_ok=True)

    @contextlib.contextmanager
    def _turn(self) -> Iterator[None]:
        """Let only one process of this host at a time check the file and act on it.

        The kernel releases this lock when its process ends. Network file systems, which would have to coordinate all
        hosts, often do not support it, and a suspended holder is not waited for: the guarded code is safe without it.
        """
        descriptor = os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            deadline = time.monotonic() + _TURN_S
            with contextlib.suppress(OSError):
                while not _locked(descriptor) and time.monotonic() < deadline:
                    time.sleep(0.01)
            yield
        finally:
            os.close(descriptor)

    def _put_back(self, moved: Path) -> None:
        try:
            with contextlib.suppress(FileExistsError, FileNotFoundError):  # its owner, or a newer one, was faster
                os.link(moved, self.path)
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
            if not self.path.exists():
                os.rename(moved, self.path)

    def _read(self, path: Path) -> bytes | None:
        try:
            return path.read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            if error.errno == errno.ESTALE:  # just replaced on the server
                return b""
            raise

    def _beside(self, what: str) -> Path:
        return self.folder / f"{LOCK}.{self._own.token}.{what}"

    # Decisions ------------------------------------------------------------------------------------------------------

    def _is_own(self, text: bytes) -> bool:
        owner = Owner.parsed(text)
        return owner is not None and owner.token == self._own.token

    def _is_stale(self, seen: bytes) -> bool:
        """Whether the owner is dead; False if the file has changed hands, so that it must be checked again."""
        owner = Owner.parsed(seen)
        standing = Standing.UNKNOWN if owner is None else owner.standing(self._own)
        if owner is not None and standing is Standing.LIVES:
            raise self._refusal(owner)
        if standing is Standing.GONE:
            return True
        now = self._watched(seen)
        newer = None if now is None else Owner.parsed(now)
        if now != seen and owner is not None and newer is not None and newer.token == owner.token:
            raise self._refusal(owner)
        return now == seen

    def _watched(self, seen: bytes) -> bytes | None:
        """The content of the file as soon as it changes, at the latest after :data:`STALE_S`."""
        owner = Owner.parsed(seen) or "an unknown process (unreadable file)"
        self._tell(f"output_dir: {self.path} is held by {owner}; waiting up to {STALE_S:.0f} s for a heartbeat")
        watched, last = 0.0, self._clock()
        while watched < STALE_S:
            self._wait(_POLL_S)
            now = self._read(self.path)
            if now != seen:
                return now
            time_now = self._clock()
            # If a check took long, this process or the file system was stalled, and maybe the owner's writes as well.
            watched, last = watched + min(time_now - last, 2 * _POLL_S), time_now
        return seen

    def _confirm(self) -> None:
        """Raise OutputError unless the current file belongs to this process or could be recreated."""
        found = self._read(self.path)
        if found is None:
            self._stop()
            if self._create():
                return
            found = self._read(self.path)
        if self._is_own(found or b""):
            return
        if found == b"":  # just replaced on the server, or torn: no visible owner
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        self._stop()
        raise self._refusal(Owner.parsed(found or b""))

    def _stop(self) -> None:
        if self._heartbeat is not None:
            self._heartbeat.stop()
            self._heartbeat = None

    def _refusal(self, owner: Owner | None) -> OutputError:
        return OutputError(
            f"output_dir: {self.folder} is in use by {owner or 'another process'}; wait for it to finish, stop it, or "
            "choose another output_dir"
        )

    def _cannot(self, error: OSError) -> OutputError:
        return OutputError(
            f"output_dir: {self.folder} cannot be locked: {error.strerror or error}; choose another output_dir"
        )


def _locked(descriptor: int) -> bool:
    """Lock an open file exclusively; return False if another process has locked it."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


class _Heartbeat(threading.Thread):
    """Increments the counter in a lock file, in place.

    Replacing the file for every heartbeat would need space, so that a full disk would make a living run look dead;
    existing bytes can always be overwritten. The open file also stays the right one whatever happens to its name: a
    run that was mistaken for dead never writes into its successor's file.

    Args:
        descriptor: the open file, which is closed at the end.
        offset: position of the counter.
    """

    def __init__(self, descriptor: int, offset: int) -> None:
        super().__init__(name="output-lock", daemon=True)
        self._descriptor, self._offset = descriptor, offset
        self._stopped = threading.Event()

    def run(self) -> None:
        """Update the counter until stopped, or until the file has been unlinked."""
        count, seen = 0, True
        while seen and not self._stopped.wait(HEARTBEAT_S):
            count += 1
            with contextlib.suppress(OSError):  # the file system is full or unavailable, possibly for a moment
                seen = os.fstat(self._descriptor).st_nlink > 0
                os.pwrite(self._descriptor, beat(count), self._offset)
                os.fdatasync(self._descriptor)  # make it visible to other hosts
        os.close(self._descriptor)

    def stop(self) -> None:
        """Stop, waiting for a write in progress unless the file system hangs."""
        self._stopped.set()
        self.join(timeout=_LAST_BEAT_S)
