"""Where the files that ship with the package lie: in a source checkout beside it, in an installed wheel inside it."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from alignment.config.errors import OptionError
from alignment.config.refusals import nearest

Kind = Literal["ds_configs", "recipes"]

_PACKAGE = Path(__file__).resolve().parent.parent
_PLACES: dict[str, tuple[str, str]] = {"ds_configs": ("ds_configs", ".json"), "recipes": ("launch/recipes", ".yaml")}


def packaged_names(kind: Kind) -> list[str]:
    """The names, without suffix, of the files of that kind that ship with the package."""
    folder, suffix = _PLACES[kind]
    places = (_PACKAGE / folder, _PACKAGE.parent / folder)
    return sorted({path.stem for place in places for path in place.glob(f"*{suffix}")})


def packaged(kind: Kind, name: str) -> Path:
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
        f"{name!r}: no such file, and no packaged {folder} file of that name{nearest(Path(name).stem, names)}; "
        f"there are: {', '.join(names)}"
    )
