"""Faster imports of transformers: duplicate work, and a package that is imported only because it is installed.

Both functions import the same modules with the same content as a plain import would. They have no effect on modules
that are already imported, or if a release has moved what they change: then the start takes longer.
"""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path
from typing import Any

_PEFT = ("PeftModel", "PeftMixedModel")


def import_model_index() -> None:
    """Import ``transformers.models`` from the index that ``import transformers`` has already built.

    Both read every file of every model to find out what is where, at 0.4 s of CPU time each. The first result is
    cached, with names under ``models``; the second one is the same without that prefix. Releases without this cache
    are left unchanged. Seen with transformers 5.23.
    """
    from unittest import mock

    import transformers
    from transformers.utils import import_utils

    read: Any = getattr(import_utils, "define_import_structure", None)
    if "transformers.models" in sys.modules or not hasattr(read, "cache_info"):
        return
    folder, under = Path(transformers.__file__).parent / "models", "models."

    def known(module_path: str, prefix: str | None = None) -> Any:
        if prefix is not None or Path(module_path).parent != folder:
            return read(module_path, prefix)
        found = {
            backends: {name.removeprefix(under): names for name, names in modules.items() if name.startswith(under)}
            for backends, modules in read(folder, prefix="models").items()
        }
        return found if any(found.values()) else read(module_path)

    with mock.patch.object(import_utils, "define_import_structure", known):
        import_module("transformers.models")


def import_trainer_utils() -> None:
    """Import ``transformers.trainer_utils`` without peft, bitsandbytes and torch's compiler: 1.5 s of CPU time.

    All parts of ``Trainer`` import that module, including ``TrainerCallback`` and the learning rate schedules. If peft
    is installed, it imports it to check later whether a model is one of peft's classes. No model is as long as peft
    has not been imported; from then on, the check is done as usual. Seen with transformers 5.23.
    """
    from unittest import mock

    from transformers import utils

    installed = getattr(utils, "is_peft_available", None)
    if installed is None or "peft" in sys.modules or "transformers.trainer_utils" in sys.modules:
        return

    def is_available() -> bool:
        peft, home = sys.modules.get("peft"), sys.modules["transformers.trainer_utils"]
        if not all(hasattr(peft, name) for name in _PEFT):  # also true while another thread imports it
            return False
        # From here on as if peft had been imported first: the function finds both classes among its module's names.
        for name in _PEFT:
            setattr(home, name, getattr(peft, name))
        setattr(home, "is_peft_available", installed)  # noqa: B010 (mypy does not know the attribute)
        return True

    def missing(name: str) -> Any:
        if name in _PEFT and installed():
            return getattr(import_module("peft"), name)
        raise AttributeError(f"module 'transformers.trainer_utils' has no attribute {name!r}")

    # The modules that this one imports must be loaded before: they might keep the stand-in.
    import_module("transformers.modeling_utils")
    with mock.patch.object(utils, "is_peft_available", is_available):
        trainer_utils = import_module("transformers.trainer_utils")
    setattr(trainer_utils, "__getattr__", missing)  # noqa: B010
