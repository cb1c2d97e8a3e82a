"""transformers as it is imported: work that it does twice, and a package that it imports because it is installed.

Both functions import the same modules with the same content as a plain import would, and do nothing for what is
imported already, nor for a release that has what they change elsewhere: then a start takes longer.
"""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path
from typing import Any

_PEFT = ("PeftModel", "PeftMixedModel")


def import_model_index() -> None:
    """Import ``transformers.models`` with what ``import transformers`` has read of it already.

    Both read every file of every model, to know what is where: 0.4 s of CPU each. The first answer is kept, with its
    names under ``models``; the second one is the same without that prefix. Releases that keep none are left as they
    are. Seen with transformers 5.23.
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
    """Import ``transformers.trainer_utils`` without peft, and with it bitsandbytes and torch's compiler: 1.5 s of CPU.

    Everything of ``Trainer`` imports that module, ``TrainerCallback`` and the learning rate schedules included. It
    imports peft where that is installed, to tell later whether a model is one of its classes. No model is while nobody
    has imported peft; from then on it asks peft, as it would have done. Seen with transformers 5.23.
    """
    from unittest import mock

    from transformers import utils

    installed = getattr(utils, "is_peft_available", None)
    if installed is None or "peft" in sys.modules or "transformers.trainer_utils" in sys.modules:
        return

    def is_available() -> bool:
        peft, home = sys.modules.get("peft"), sys.modules["transformers.trainer_utils"]
        if not all(hasattr(peft, name) for name in _PEFT):  # also while another thread imports it
            return False
        # From here on as if it had been imported at first. The function finds both classes among its module's names.
        for name in _PEFT:
            setattr(home, name, getattr(peft, name))
        setattr(home, "is_peft_available", installed)  # noqa: B010 (mypy knows no such attribute)
        return True

    def missing(name: str) -> Any:
        if name in _PEFT and installed():
            return getattr(import_module("peft"), name)
        raise AttributeError(f"module 'transformers.trainer_utils' has no attribute {name!r}")

    # What this module imports has to be there already: it might keep the stand-in as its own.
    import_module("transformers.modeling_utils")
    with mock.patch.object(utils, "is_peft_available", is_available):
        trainer_utils = import_module("transformers.trainer_utils")
    setattr(trainer_utils, "__getattr__", missing)  # noqa: B010
