"""One writer per output folder: a file in it names the process that writes there, and shows that it lives.

The lock is a file, because those of the operating system do not reach across hosts on every network file system. A run
that was killed leaves its file behind, so a later one has to find out whether the owner lives. On the same machine the
process table tells. From elsewhere only the heartbeat does: a counter which the owner raises, and which an observer
watches by its own clock, because the clocks of two hosts may differ.
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

from alignment.config.errors import OutputError
from alignment.engines.checkpoints.owner import Owner, Standing, beat

LOCK = ".lock"
HEARTBEAT_S = 5.0
STALE_S = 60.0  # a heartbeat that stands still for so long has stopped
_POLL_S = 1.0
_LAST_BEAT_S = 5.0  # how long a beat that is under way may take when the lock is given back
_SETTLE_S = 0.5  # far longer than another process needs from its last look at a stale file to its rename
_TURN_S = 5.0
_NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)


def _print(text: str) -> None:
    print(text, flush=True)


class OutputLock:
    """The right to write into a folder; one rank of a run takes it, for all of them.

    Args:
        folder: the output folder.
        own: the process that takes it; None: the calling one.
        tell: prints a line for the user.
        clock, wait: the observer's, in seconds.
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
        """Look whether a process of this machine holds the lock; nothing is changed, and nothing waited for.

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
        """Take the lock, making the folder; at once if nobody holds it or the owner is known to be gone.

        The file of an owner that cannot be looked up, and one that a crash has torn, is watched for a minute first.

        Raises:
            OutputError: another process holds it, or the folder cannot be written.
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
                # A process of another host may have moved this file away, taking it for the stale one.
                self._wait(_SETTLE_S)
                self._confirm()
            for left in self.folder.glob(f"{LOCK}.*"):  # by processes that were killed while they took the lock
                left.unlink(missing_ok=True)
        except OSError as error:
            raise self._cannot(error) from error
        atexit.register(self.release)  # for whoever never closes its trainer

    def check(self) -> None:
        """Make sure that the folder is still this run's; a file that somebody removed is written again.

        A run that stood still for a minute (stopped by a signal, its machine suspended) may have been taken for dead.

        A file system that does not answer is told and no more: whoever writes next will meet it.

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
        """Give the lock back if it is this process's; calling it again changes nothing."""
        if self._heartbeat is None or os.getpid() != self._pid:  # a fork has the object, and not the lock
            return
        atexit.unregister(self.release)
        self._stop()
        try:
            with contextlib.suppress(FileNotFoundError):  # somebody has removed the folder
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
        """Put a file of this process into place; False if there is one already."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with self._turn():
            descriptor = self._linked()
        if descriptor is None:
            return False
        self._heartbeat = _Heartbeat(descriptor, len(self._own.text()) - len(beat(0)))
        self._heartbeat.start()
        return True

    def _linked(self) -> int | None:
        """The lock file, opened; None if another is in its place. It appears there with its content, or not at all."""
        aside = self._beside("new")
        descriptor = self._written(aside)
        try:
            os.link(aside, self.path)
            return descriptor
        except (FileExistsError, FileNotFoundError):  # there is an owner, who may have tidied up the other file
            if self._is_own(self._read(self.path) or b""):  # NFS has repeated a request that had succeeded
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
        """As :meth:`_linked`, on a file system without links; another process may see an empty file for a moment."""
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
        """Remove the lock file if it is the wanted one. No process can remove one that it has not looked at."""
        moved = self._beside("old")
        with self._turn():
            if not wanted(self._read(self.path) or b""):
                return
            with contextlib.suppress(FileNotFoundError):
                os.rename(self.path, moved)
            found = self._read(moved)
            if found is not None and not wanted(found):  # replaced between the look and the rename
                self._put_back(moved)
            moved.unlink(missing_ok=True)

    @contextlib.contextmanager
    def _turn(self) -> Iterator[None]:
        """Let one process of this host at a time look at the file and act on it.

        The kernel keeps the turn, so that it ends with its process. Network file systems, which would have to keep it
        for all hosts, mostly refuse; a process that was stopped in its turn is not waited for: what is done within is
        made to be safe without.
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
            if error.errno == errno.ESTALE:  # replaced on the server just now
                return b""
            raise

    def _beside(self, what: str) -> Path:
        return self.folder / f"{LOCK}.{self._own.token}.{what}"

    # Judgement ------------------------------------------------------------------------------------------------------

    def _is_own(self, text: bytes) -> bool:
        owner = Owner.parsed(text)
        return owner is not None and owner.token == self._own.token

    def _is_stale(self, seen: bytes) -> bool:
        """Whether the owner is gone; False if the file has changed hands, so that one has to look again."""
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
        """The content of the file as soon as it is another one, at the latest after :data:`STALE_S`."""
        owner = Owner.parsed(seen) or "a file that cannot be read"
        self._tell(f"output_dir: {self.path} is held by {owner}: waiting up to {STALE_S:.0f} s for a sign of life")
        watched, last = 0.0, self._clock()
        while watched < STALE_S:
            self._wait(_POLL_S)
            now = self._read(self.path)
            if now != seen:
                return now
            time_now = self._clock()
            # Where a look took long, this process or the file system stood still, and the owner's writes maybe too.
            watched, last = watched + min(time_now - last, 2 * _POLL_S), time_now
        return seen

    def _confirm(self) -> None:
        """Raise OutputError unless the file in place is this process's, or could be written again."""
        found = self._read(self.path)
        if found is None:
            self._stop()
            if self._create():
                return
            found = self._read(self.path)
        if self._is_own(found or b""):
            return
        if found == b"":  # replaced on the server just now, or torn: nobody's, as far as can be seen
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        self._stop()
        raise self._refusal(Owner.parsed(found or b""))

    def _stop(self) -> None:
        if self._heartbeat is not None:
            self._heartbeat.stop()
            self._heartbeat = None

    def _refusal(self, owner: Owner | None) -> OutputError:
        return OutputError(
            f"output_dir: {self.folder} is in use by {owner or 'another process'}; wait for it to end, stop it, or "
            "choose another output_dir"
        )

    def _cannot(self, error: OSError) -> OutputError:
        return OutputError(
            f"output_dir: {self.folder} cannot be locked: {error.strerror or error}; choose another output_dir"
        )


def _locked(descriptor: int) -> bool:
    """Lock an open file for this process alone; False if another one has it locked."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


class _Heartbeat(threading.Thread):
    """Raises the counter in a lock file, in place.

    A file that was replaced for every beat would need space, which a full disk has not: a living run would look dead.
    Bytes that are there already can be written again. The open file is also the right one whatever has become of its
    name: a run that was taken for dead never writes into its successor's.

    Args:
        descriptor: the open file, closed at the end.
        offset: where the counter is.
    """

    def __init__(self, descriptor: int, offset: int) -> None:
        super().__init__(name="output-lock", daemon=True)
        self._descriptor, self._offset = descriptor, offset
        self._stopped = threading.Event()

    def run(self) -> None:
        """Beat until stopped, or until nobody can see the file any more."""
        count, seen = 0, True
        while seen and not self._stopped.wait(HEARTBEAT_S):
            count += 1
            with contextlib.suppress(OSError):  # of a file system that is full or away: it may be back for the next
                seen = os.fstat(self._descriptor).st_nlink > 0
                os.pwrite(self._descriptor, beat(count), self._offset)
                os.fdatasync(self._descriptor)  # or other hosts would not see it
        os.close(self._descriptor)

    def stop(self) -> None:
        """End it, waiting for a beat that is under way unless the file system hangs."""
        self._stopped.set()
        self.join(timeout=_LAST_BEAT_S)
