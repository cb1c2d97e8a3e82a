"""Resolve what options name: packaged files, and a user's own code as ``file.py:name``."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import importlib
import importlib.util
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from alignment.config.errors import Leaving, OptionError, did_you_mean, listing, setting, show

_PACKAGE = Path(__file__).resolve().parent.parent
_PLACES = {"ds_configs": "ds_configs/*.json", "recipes": "launch/recipes/*.yaml", "slurm": "launch/slurm/*.sbatch"}
# Exceptions of a user's code that are reported as such; sys.exit() raises SystemExit.
FAILURES = (Exception, asyncio.CancelledError, SystemExit)
_LONGEST = 300
# Folders of this package that call a user's code; their frames are not shown to the user.
_CALLERS = tuple(_PACKAGE / name for name in ("config", "engines", "run", "rewards"))


def packaged_names(kind: str) -> list[str]:
    """Return the names, without suffix, of the packaged files of a kind."""
    return sorted(_files(kind))


def packaged(kind: str, name: str) -> Path:
    """Return the path of a packaged file, named with or without its suffix. Raises :class:`OptionError` if missing."""
    files, (folder, _, pattern) = _files(kind), _PLACES[kind].rpartition("/")
    stem = name.removesuffix(pattern[1:])
    if stem not in files:
        known = f"available in {folder}: {listing(sorted(files))}{did_you_mean(Path(stem).stem, files)}"
        raise OptionError(f"{name!r}: no such file, neither as a path nor in {folder}; {known}")
    return files[stem]


def _files(kind: str) -> dict[str, Path]:
    """Return the packaged files of a kind by name; those inside the package come before those beside it."""
    return {path.stem: path for place in (_PACKAGE.parent, _PACKAGE) for path in place.glob(_PLACES[kind])}


def load_named(given: str, option: str) -> Any:
    """Import the object that ``given`` names, as ``path/to/file.py:name`` or ``package.module:name``.

    Raises:
        OptionError: the file, module or name does not exist, or the import fails; ``option`` is named.
    """
    where = setting(option, given)
    target, _, name = given.rpartition(":")
    if not target or not name:
        raise OptionError(f"{where}: expected file.py:name or package.module:name")
    if target.endswith(".py") or "/" in target:
        module = _from_file(Path(target).expanduser(), where)
    else:
        with running(f"{where}: importing {target}", "fix or install it, or pass a file as file.py:name"):
            module = importlib.import_module(target)
    if not hasattr(module, name):
        own = [n for n, value in vars(module).items() if getattr(value, "__module__", None) == module.__name__]
        near = did_you_mean(name, own) or f"; available names: {listing(own)}"
        raise OptionError(f"{where}: {target} does not define {name!r}{near}")
    return getattr(module, name)


def raised(error: BaseException) -> str:
    """Describe an exception of a user's code and its location: ``KeyError: 'x' (lengths.py, line 3)``."""
    text = " ".join(str(error).split())
    said = type(error).__name__ + (
        f": {text if len(text) <= _LONGEST else text[: _LONGEST - 1] + '…'}" if text else ""
    )
    frames = [(Path(frame.filename), frame.lineno) for frame in traceback.extract_tb(error.__traceback__)]
    frames = [(path, line) for path, line in frames if path.parent not in _CALLERS and "importlib" not in str(path)]
    # Further files belong to libraries, which the user cannot fix.
    lines = [line for path, line in frames if path == frames[0][0]]
    return f"{said} ({frames[0][0].name}, line {lines[-1]})" if frames else said


@contextlib.contextmanager
def running(what: str, advice: str) -> Iterator[None]:
    """Report an exception of a user's code in this context as :class:`OptionError`: ``WHAT raised ERROR; ADVICE``."""
    try:
        yield
    except Leaving:
        raise
    except FAILURES as error:
        raise OptionError(f"{what} raised {raised(error)}; {advice}") from error


def _from_file(path: Path, where: str) -> ModuleType:
    """Import a file, once per process and content, so that two functions of a file share its globals."""
    try:
        source = path.read_bytes()
    except OSError as error:
        raise OptionError(f"{where}: cannot read {path}: {error.strerror or error}; check the path") from error
    path = path.resolve()
    private = f"_alignment_{path.stem}_{hashlib.sha256(str(path).encode() + source).hexdigest()[:16]}"
    if private in sys.modules:
        return sys.modules[private]
    spec = importlib.util.spec_from_file_location(private, path)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[private] = module  # before it runs, as dataclasses look up their module
    # As for a script, put its folder first on the import path.
    sys.path.insert(0, str(path.parent))
    try:
        # Not with the loader, which would write bytecode next to the user's file.
        with running(f"{where}: importing {path.name}", "fix that file"):
            exec(compile(source, str(path), "exec"), module.__dict__)
    except BaseException:
        del sys.modules[private]
        raise
    finally:
        with contextlib.suppress(ValueError):
            sys.path.remove(str(path.parent))
    return module


def load_callable(given: str, option: str, method: str | None = None) -> Any:
    """Import a callable as :func:`load_named`; a class is instantiated without arguments.

    With ``method``, such as ``judge``, an object may have this method instead of being callable.
    """
    where, found = setting(option, given), load_named(given, option)
    if isinstance(found, type):
        with running(f"{where}: {found.__name__}()", "it must be possible to create without arguments"):
            found = found()
    if not callable(found) and not (method is not None and callable(getattr(found, method, None))):
        wanted = "a function or class" if method is None else f"a function, or a class with a method {method!r}"
        raise OptionError(f"{where}: {given.rpartition(':')[2]} is {show(found)}; expected {wanted}")
    return found
