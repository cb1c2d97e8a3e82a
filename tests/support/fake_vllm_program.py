"""The text of a program that is started as ``vllm``: answers ``/health``, and starts a child, as vLLM does.

``FAKE_VLLM`` in its environment chooses a fault: ``fails`` (exits with an error), ``hangs`` (never listens) or
``deaf`` (ignores SIGTERM). Arguments, environment and process IDs are written to the file ``FAKE_VLLM_FACTS``.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

PROGRAM = """\
import http.server, json, os, signal, subprocess, sys, time
fault = os.environ.get("FAKE_VLLM")
if fault == "deaf":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # by the child as well
child = subprocess.Popen(["sleep", "1000"])
facts = {"arguments": sys.argv[1:], "environment": dict(os.environ), "pids": [os.getppid(), os.getpid(), child.pid]}
with open(os.environ["FAKE_VLLM_FACTS"] + ".part", "w") as file:
    json.dump(facts, file)
os.rename(file.name, os.environ["FAKE_VLLM_FACTS"])
print("INFO loading", flush=True)
if fault == "fails":
    print("(Worker pid=1) ERROR 11-29 ValueError: no such model")
    print("RuntimeError: Engine core initialization failed. See root cause above.", flush=True)
    sys.exit(3)
if fault == "hangs":
    time.sleep(1000)


print("ValueError: of the warm-up", flush=True)


class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if self.path == "/health" else 404)
        self.end_headers()

    def log_message(self, *arguments):
        pass


http.server.HTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Handler).serve_forever()
"""


def write_program(folder: Path, monkeypatch: Any, fault: str = "") -> tuple[Path, Path]:
    """Write the program and set its environment; return its path, and that of the file with its facts."""
    program, facts = folder / "vllm", folder / "facts.json"
    program.write_text(f"#!{os.path.realpath(sys.executable)} -IS\n{PROGRAM}", encoding="utf-8")
    program.chmod(0o755)
    monkeypatch.setenv("FAKE_VLLM", fault)
    monkeypatch.setenv("FAKE_VLLM_FACTS", str(facts))
    return program, facts
