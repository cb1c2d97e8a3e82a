"""What options name: files that ship with the package, and a user's own code as ``file.py:name``."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import importlib
import importlib.util
import sys
import traceback
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

from alignment.config.errors import Leaving, OptionError, did_you_mean, setting, show

Packaged = Literal["ds_configs", "recipes", "slurm"]

_PACKAGE = Path(__file__).resolve().parent.parent
_PLACES: dict[str, tuple[str, str]] = {
    "ds_configs": ("ds_configs", ".json"),
    "recipes": ("launch/recipes", ".yaml"),
    "slurm": ("launch/slurm", ".sbatch"),
}
# What a user's code may raise and be named for; SystemExit is what sys.exit() raises.
FAILURES = (Exception, asyncio.CancelledError, SystemExit)
_LONGEST = 300
# Folders of this package that call a user's code; frames in them are not the user's.
_CALLERS = tuple(Path(__file__).parent.parent / name for name in ("config", "engines", "engines/watch", "rewards"))


def packaged_names(kind: Packaged) -> list[str]:
    """The names, without suffix, of the files of that kind that ship with the package."""
    folder, suffix = _PLACES[kind]
    places = (_PACKAGE / folder, _PACKAGE.parent / folder)
    return sorted({path.stem for place in places for path in place.glob(f"*{suffix}")})


def packaged(kind: Packaged, name: str) -> Path:
    """The packaged file of that kind, named with or without its suffix.

    Raises:
        OptionError: there is none of that name; the message lists those that there are.
    """
    folder, suffix = _PLACES[kind]
    file_name = name if name.endswith(suffix) else name + suffix
    if Path(file_name).name == file_name:
        # Inside the package first: beside an installed one lies site-packages, where the name could be another's.
        for place in (_PACKAGE / folder, _PACKAGE.parent / folder):
            if (place / file_name).is_file():
                return place / file_name
    names = packaged_names(kind)
    raise OptionError(
        f"{name!r}: no such file, and no packaged {folder} file of that name{did_you_mean(Path(name).stem, names)}; "
        f"there are: {', '.join(names)}"
    )


def load_named(given: str, option: str) -> Any:
    """What ``given`` names.

    Args:
        given: ``path/to/file.py:name`` or ``package.module:name``.
        option: the option that says so, for messages.

    Raises:
        OptionError: there is no such file, module or name, or importing it fails.
    """
    where = setting(option, given)
    target, _, name = given.rpartition(":")
    if not target or not name:
        raise OptionError(f"{where}: name it as file.py:name or package.module:name")
    is_file = target.endswith(".py") or "/" in target
    module = _from_file(Path(target).expanduser(), where) if is_file else _from_package(target, where)
    if not hasattr(module, name):
        own = [n for n, value in vars(module).items() if getattr(value, "__module__", None) == module.__name__]
        near = did_you_mean(name, own) or f"; it has: {', '.join(own) or 'none'}"
        raise OptionError(f"{where}: {target} has no {name!r}{near}")
    return getattr(module, name)


def raised(error: BaseException) -> str:
    """What a user's code raised, and where in it: ``KeyError: 'x' (lengths.py line 3)``."""
    text = " ".join(str(error).split())
    text = text if len(text) <= _LONGEST else text[: _LONGEST - 1] + "…"
    said = f"{type(error).__name__}: {text}" if text else type(error).__name__
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if _is_foreign(frame.filename)]
    if not frames:
        return said
    # Of the frames below, in libraries, a user can mend nothing.
    last = [frame for frame in frames if frame.filename == frames[0].filename][-1]
    return f"{said} ({Path(last.filename).name} line {last.lineno})"


def _is_foreign(filename: str) -> bool:
    return Path(filename).parent not in _CALLERS and "importlib" not in filename


def _from_file(path: Path, where: str) -> ModuleType:
    """The file as a module; once per process and content, so that two functions of a file share what it holds."""
    try:
        source = path.read_bytes()
    except OSError as error:
        raise OptionError(
            f"{where}: {path} cannot be read: {error.strerror or error}; set the path of a file"
        ) from error
    path = path.resolve()
    private = f"_alignment_{path.stem}_{hashlib.sha256(str(path).encode() + source).hexdigest()[:16]}"
    if private in sys.modules:
        return sys.modules[private]
    spec = importlib.util.spec_from_file_location(private, path)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[private] = module  # while it runs already: dataclasses look their module up
    # As for a script, its folder comes first for what it imports.
    sys.path.insert(0, str(path.parent))
    try:
        # Not by the loader, which would write compiled code beside the user's file.
        exec(compile(source, str(path), "exec"), module.__dict__)
    except Leaving:
        del sys.modules[private]
        raise
    except FAILURES as error:
        del sys.modules[private]
        raise OptionError(f"{where}: importing {path.name} raised {raised(error)}; correct it") from error
    finally:
        with contextlib.suppress(ValueError):
            sys.path.remove(str(path.parent))
    return module


def _from_package(name: str, where: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and f"{name}.".startswith(f"{error.name}."):
            raise OptionError(
                f"{where}: there is no module {error.name!r}; install it, or name a file as file.py:name"
            ) from error
        raise OptionError(f"{where}: importing {name} raised {raised(error)}; correct it") from error
    except Leaving:
        raise
    except FAILURES as error:
        raise OptionError(f"{where}: importing {name} raised {raised(error)}; correct it") from error


def load_callable(given: str, option: str, method: str | None = None) -> Any:
    """What ``given`` names; an instance of it, made without arguments, where it is a class.

    Args:
        given: ``path/to/file.py:name`` or ``package.module:name``.
        option: the option that says so, for messages.
        method: a method that makes an object as good as a callable, such as ``judge``.

    Raises:
        OptionError: there is no such file, module or name, importing it fails, or it cannot be called.
    """
    where, found = setting(option, given), load_named(given, option)
    if isinstance(found, type):
        found = _instance(found, where)
    if not callable(found) and not (method is not None and callable(getattr(found, method, None))):
        wanted = "a function or class" if method is None else f"a function, or a class with a method {method!r}"
        name = given.rpartition(":")[2]
        raise OptionError(f"{where}: {name} is {show(found)}, which cannot be called; name {wanted}")
    return found


def _instance(kind: type, where: str) -> Any:
    try:
        return kind()
    except Leaving:
        raise
    except FAILURES as error:
        raise OptionError(
            f"{where}: making a {kind.__name__} without arguments raised {raised(error)}; give its arguments defaults"
        ) from error
