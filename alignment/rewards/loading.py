"""A user's function, class or object by name: ``file.py:name`` or ``package.module:name``."""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from alignment.config.errors import OptionError
from alignment.config.refusals import nearest, shown
from alignment.data.wording import listing, show
from alignment.rewards.calling import FAILURES, raised


def load_callable(given: str, option: str, method: str | None = None) -> Any:
    """What ``given`` names; an instance of it, made without arguments, where it is a class.

    Args:
        given: ``path/to/file.py:name`` or ``package.module:name``.
        option: the option that says so, for messages.
        method: a method that makes an object as good as a callable, such as ``judge``.

    Raises:
        OptionError: there is no such file, module or name, importing it fails, or it cannot be called.
    """
    where = shown(option, given)
    target, _, name = given.rpartition(":")
    if not target or not name:
        raise OptionError(f"{where}: name it as file.py:function or package.module:function")
    is_file = target.endswith(".py") or "/" in target
    module = _from_file(Path(target).expanduser(), where) if is_file else _from_package(target, where)
    if not hasattr(module, name):
        own = [n for n, value in vars(module).items() if getattr(value, "__module__", None) == module.__name__]
        raise OptionError(f"{where}: {target} has no {name!r}{nearest(name, own) or f'; it has: {listing(own)}'}")
    found = getattr(module, name)
    if isinstance(found, type):
        found = _instance(found, where)
    if not callable(found) and not (method is not None and callable(getattr(found, method, None))):
        wanted = "a function or class" if method is None else f"a function, or a class with a method {method!r}"
        raise OptionError(f"{where}: {name} is {show(found)}, which cannot be called; name {wanted}")
    return found


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
                f"{where}: there is no module {error.name!r}; install it, or name a file as file.py:function"
            ) from error
        raise OptionError(f"{where}: importing {name} raised {raised(error)}; correct it") from error
    except FAILURES as error:
        raise OptionError(f"{where}: importing {name} raised {raised(error)}; correct it") from error


def _instance(kind: type, where: str) -> Any:
    try:
        return kind()
    except FAILURES as error:
        raise OptionError(
            f"{where}: making a {kind.__name__} without arguments raised {raised(error)}; give its arguments defaults"
        ) from error
