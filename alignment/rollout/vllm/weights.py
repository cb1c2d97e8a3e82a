"""Sends the policy's weights to vLLM servers: adapters under a new name and path, or all weights of a full model.

They travel as files in a folder that the server sees under the same path. Names and paths are never reused: vLLM keeps
the keys and values of earlier prompts by an adapter's name and path, also if its files change.

Seen with vLLM 0.32: after a reload that failed, the server has no weights, and ends at the next completion. It also
ends if it dropped an adapter from memory, has to read it again, and the files are gone. Hence a server stays paused
after an error, and the files of an adapter remain until it is unloaded.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import socket
import tempfile
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from alignment.config.errors import OutputError, TrainingError
from alignment.engines.collectives import gathered, together
from alignment.engines.scoring import ScoringEngine
from alignment.models.adapters.record import Adapters
from alignment.models.partitioning import whole_parameters
from alignment.models.source import ModelSource
from alignment.models.writing import write_adapters, write_model
from alignment.rollout.vllm.client import Client
from alignment.run.lock import LOCK, is_locked
from alignment.run.ranks import rank

MEMORY = Path("/dev/shm")  # Linux: files in the host's memory
_KEY = "vllm_weights_folder"
_PREFIX = "alignment-vllm-"
_CLOSING_S = 10.0  # that a server may take for the end of a run
_YOUNG_S = 60.0  # a folder without a lock may be that of a run that is about to lock it


class WeightSync:
    """Replaces the weights of vLLM servers by those of the policy.

    The first rank of each host that has a client writes the files, for all ranks of that host. Collective.

    Args:
        client: of the server that this rank updates; None if another rank does.
        policy: the engine that is trained.
        adapters: what is trained, and sent; None: the full model.
        source: the policy's model.
        folder: where the files are written, in a new folder; it has to exist. None: in memory if they fit there,
            otherwise among temporary files.
        base_name: the name of the server's own model in requests.

    Raises:
        OutputError: on every rank, if the folder cannot be written.
    """

    def __init__(
        self,
        client: Client | None,
        policy: ScoringEngine,
        adapters: Adapters | None,
        source: ModelSource,
        folder: Path | None,
        *,
        base_name: str,
    ) -> None:
        self._client, self._model, self._adapters, self._source = client, policy.scorer.model, adapters, source
        self._base_name, self._given = base_name, folder is not None
        self._loaded: list[str] = []  # adapters
        self._held: IO[bytes] | None = None  # the lock of the folder, which ends with this process
        host = None if client is None else socket.gethostname()
        hosts = gathered(host)
        writer = hosts.index(host)
        self._writes = client is not None and writer == rank()
        own = Path()
        with together(OutputError):
            if self._writes:
                own = self._claimed(folder or _memory(self._size()))
        self._folder: Path = gathered(own)[writer]

    def update(self, version: str) -> str:
        """Send the weights, as those of ``version``; return the model to request for completions. Collective.

        Raises:
            OutputError: on every rank, if the files cannot be written.
            TrainingError: on every rank, if a server does not take them; completions are then not to be used.
        """
        path = self._folder / version
        with together(OutputError):
            if self._adapters is None:
                write_model(self._model, None, path, first_rank=self._writes, key=_KEY)
            else:
                write_adapters(
                    self._model, self._adapters, self._source, None, path, first_rank=self._writes, key=_KEY
                )
        with together(TrainingError):
            if self._client is not None and self._adapters is None:
                self._reload(self._client, path, version)
            elif self._client is not None:
                self._load(self._client, path, version)
        if self._writes:
            for old in self._folder.iterdir():
                if old.is_dir() and (self._adapters is None or old != path):
                    shutil.rmtree(old, ignore_errors=True)
        return self._base_name if self._adapters is None else version

    def _reload(self, client: Client, path: Path, version: str) -> None:
        """Replace all weights. What was cached, and the version, belong to the old ones until the server resumes."""
        client.pause()
        with self._explained("; it may have lost its weights and stays paused: restart it"):
            client.reload(path)
        client.reset_prefix_cache()
        client.set_version(version)
        client.resume()

    def _load(self, client: Client, path: Path, version: str) -> None:
        """Load the adapter under the name of its version, and unload older ones, which keep their files until then."""
        older, self._loaded = self._loaded, [*self._loaded, version]  # first: an attempt may succeed and be unanswered
        with self._explained(""):
            client.load_adapter(version, path)
        client.set_version(version)
        for name in older:
            client.unload_adapter(name)
        self._loaded = [version]

    @contextlib.contextmanager
    def _explained(self, consequence: str) -> Iterator[None]:
        """Add to an error that the server may not see the files, which vLLM takes for the name of a model."""
        try:
            yield
        except TrainingError as error:
            shared = "it shares" if self._given else "the server shares, if it runs on another host or in a container"
            raise TrainingError(f"{error}{consequence}; {_KEY} has to be a folder that {shared}") from error

    def close(self) -> None:
        """Unload adapters and delete the files; without the other ranks, and at most once."""
        names, self._loaded = self._loaded, []
        if self._client is not None and names:
            self._client.timeout = min(self._client.timeout, _CLOSING_S)
            with contextlib.suppress(TrainingError):  # of a server that is gone
                for name in names:
                    self._client.unload_adapter(name)
        if self._held is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._held.close()
            self._held = None

    def _claimed(self, parent: Path) -> Path:
        """Create a folder that this process holds, and delete those of processes that were killed."""
        try:
            for old in parent.glob(f"{_PREFIX}*"):
                if time.time() - old.stat().st_mtime > _YOUNG_S and is_locked(old) is False:
                    shutil.rmtree(old, ignore_errors=True)
            folder = parent.resolve() / f"{_PREFIX}{uuid.uuid4().hex[:12]}"
            folder.mkdir()
            self._held = (folder / LOCK).open("wb")
            with contextlib.suppress(OSError):  # without locks, nothing is deleted as that of a killed process
                fcntl.flock(self._held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise OutputError(f"{_KEY}: {parent} cannot be used: {error.strerror or error}") from error
        return folder

    def _size(self) -> int:
        """Bytes of the files at one time: all weights, or the adapters of two versions."""
        if self._adapters is None:
            return whole_parameters(self._model) * self._model.dtype.itemsize
        return 2 * self._adapters.trained * self._model.dtype.itemsize


def _memory(size: int) -> Path:
    """The folder in memory, if it has twice the room; containers often limit it to 64 MiB."""
    if os.access(MEMORY, os.W_OK) and shutil.disk_usage(MEMORY).free > 2 * size:
        return MEMORY
    return Path(tempfile.gettempdir())
