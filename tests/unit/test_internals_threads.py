"""Assumptions of `alignment.internals.process_end`."""

from __future__ import annotations

import subprocess
import sys

import pytest
from conftest import ROOT

SCRIPT = """
import sys, threading, time
from concurrent.futures import ThreadPoolExecutor
sys.path.insert(0, {root!r})
from alignment.internals.process_end import before_threads_end, leave_daemon_pools

def exiting():
    if {leaves}:
        leave_daemon_pools()
    with ThreadPoolExecutor(1) as pool:
        print(pool.submit(lambda: "at work").result(), flush=True)

def work():
    with ThreadPoolExecutor(1) as pool:
        pool.submit(time.sleep, 100)

before_threads_end(exiting)
threading.Thread(target=work, daemon=True).start()
time.sleep(0.1)
"""


@pytest.mark.parametrize("leaves", [True, False])
def test_a_pool_of_a_daemon_thread_does_not_hold_the_exit(leaves: bool) -> None:
    command = [sys.executable, "-c", SCRIPT.format(root=str(ROOT), leaves=leaves)]
    running = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    with running, running.stdout:
        assert running.stdout.readline() == "at work\n"
        try:
            assert running.wait(20 if leaves else 1) == 0 and leaves
        except subprocess.TimeoutExpired:
            assert not leaves, "the interpreter waits"
        running.kill()
