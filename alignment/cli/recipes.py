"""Recipes: YAML files with a method and its options, flat or in sections."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from alignment.compat.trl.names import older_names
from alignment.config.errors import OptionError, one_line, setting
from alignment.config.fields import words
from alignment.config.lookup import packaged
from alignment.config.registry import METHODS, option_names

if TYPE_CHECKING:
    from alignment.config.options import AlignmentConfig


_MOST_BYTES = 1_000_000
_NUMBER = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$")
_USUAL_SECTIONS = frozenset(words("model reference data rollout rewards training memory logging evaluation saving"))


class _Loader(yaml.SafeLoader):
    """PyYAML's safe loader, with an error for duplicate keys, and with JSON's numbers and strings."""


def _mapping(loader: _Loader, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
    seen: set[str] = set()
    for key_node, _ in node.value:
        key = loader.construct_object(key_node, deep=True)
        where = f"{loader.name}, line {key_node.start_mark.line + 1}"
        if not isinstance(key, str):
            raise OptionError(f"{where}: the key {key!r} must be a string, the name of an option")
        if key in seen:
            raise OptionError(f"{where}: duplicate key {key!r}; remove one of them")
        seen.add(key)
    return loader.construct_mapping(node, deep=True)


def _text(loader: _Loader, node: yaml.ScalarNode) -> str:
    """Return a string, with the two escapes that JSON writes for a character such as an emoji joined to one."""
    text: str = loader.construct_scalar(node)
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "surrogatepass")


_Loader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _mapping)
_Loader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_SCALAR_TAG, _text)
# YAML 1.1 requires a point and a sign in 1.0e-7, so that 1e-07, as JSON is written, would be a string in a mapping.
_Loader.add_implicit_resolver("tag:yaml.org,2002:float", _NUMBER, list("+-.0123456789"))


def read_recipe(name: str, outside: Iterable[type[AlignmentConfig]] = ()) -> dict[str, Any]:
    """Read the options of a recipe, with its sections flattened and its values as YAML parses them.

    Args:
        name: a path, or the name of a packaged recipe (``kto``, ``kto.yaml``).
        outside: options classes of third-party methods.

    Raises:
        OptionError: the file does not exist, is not valid YAML, or has a duplicate or invalid key.
    """
    path = Path(name).expanduser()
    if not path.is_file():
        path = packaged("recipes", name)
    try:
        if path.stat().st_size > _MOST_BYTES:
            raise OptionError(f"{path}: too large for a recipe; if it is a data file, pass it as --dataset_name")
        with path.open(encoding="utf-8") as file:
            content = yaml.load(file, _Loader)
    except OptionError:
        raise
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f", line {mark.line + 1}" if mark is not None else ""
        problem = " ".join(str(getattr(error, "problem", None) or error).split())
        advice = "indent with spaces" if "'\\t'" in problem else "correct that line"
        raise OptionError(f"{path}{line}: invalid YAML: {problem}; {advice}") from None
    except (OSError, ValueError) as error:  # a number or date that YAML accepts and Python rejects is a ValueError
        raise OptionError(f"{path}: cannot be read ({one_line(error)}); pass a YAML file") from None
    except RecursionError:
        raise OptionError(f"{path}: nested too deeply; write options as key: value, in sections or not") from None
    if not isinstance(content, (dict, type(None))):
        raise OptionError(f"{path}: expected a mapping, found {type(content).__name__}; write options as key: value")
    classes = (*METHODS.values(), *outside)
    known = {"method"}.union(*map(option_names, classes), *map(older_names, classes))
    return _flattened(content or {}, str(path), known)


def _flattened(content: dict[str, Any], where: str, options: set[str]) -> dict[str, Any]:
    """Flatten the sections: mappings, or nothing under a usual name, whose keys are not the names of options."""
    flat: dict[str, Any] = {}
    for key, value in content.items():
        is_section = isinstance(value, dict) or (value is None and key in _USUAL_SECTIONS)
        section = (value or {}) if is_section and key not in options else {key: value}
        for name, inner in section.items():
            if name in flat:
                raise OptionError(f"{where}: {setting(name, inner)}: duplicate option; remove one of them")
            flat[name] = inner
    return flat
