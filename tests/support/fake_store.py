"""An in-memory substitute for the process group's store, and an exception that replaces the end of a process."""

from __future__ import annotations

import threading
from typing import NoReturn


class Ended(SystemExit):
    """Raised instead of ending the process."""


def ended(code: int) -> NoReturn:
    """Replaces ``os._exit``."""
    raise Ended(code)


class Store:
    """Keys and values, and the number of reads."""

    def __init__(self) -> None:
        self.values: dict[str, str] = {}
        self.asked = 0
        self._lock = threading.Lock()

    def set(self, key: str, value: str) -> None:
        self.values[key] = value

    def compare_set(self, key: str, expected: str, value: str) -> bytes:
        assert expected == ""
        return self.values.setdefault(key, value).encode()

    def get(self, key: str) -> bytes:
        self.asked += 1
        return self.values[key].encode()

    def multi_get(self, keys: list[str]) -> list[bytes]:
        return [self.get(key) for key in keys]

    def check(self, keys: list[str]) -> bool:
        self.asked += len(keys)
        return all(key in self.values for key in keys)

    def add(self, key: str, more: int) -> int:
        with self._lock:
            self.values[key] = str(int(self.values.get(key, 0)) + more)
            return int(self.values[key])
