"""Judges that options can select without user code: models at an endpoint, and the judges of TRL's scripts."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from alignment.config.errors import OptionError, did_you_mean, listing, setting
from alignment.rewards.asking import ModelJudge
from alignment.rewards.endpoint import EndpointJudge, OpenAIPairwiseJudge
from alignment.rewards.hub_judges import HfPairwiseJudge, PairRMJudge

NAMED = {"openai": OpenAIPairwiseJudge, "hf": HfPairwiseJudge, "pair_rm": PairRMJudge}
_SECRET = ("key", "token", "password", "secret", "authorization")


def is_named(judge: Any, option: Any) -> bool:
    """Return whether ``option`` is the name with which TRL's scripts create such a judge."""
    return isinstance(option, str) and option in NAMED and isinstance(judge, NAMED[option])


def named_judge(option: Any) -> Any:
    """Create the judge for a name in :data:`NAMED` or for a mapping; return None for anything else.

    Raises:
        OptionError: the mapping has an unknown key or an invalid value.
    """
    if isinstance(option, str) and option in NAMED:
        return NAMED[option]()
    return _endpoint(option) if isinstance(option, Mapping) else None


def _endpoint(given: Mapping[str, Any]) -> EndpointJudge:
    known = sorted(
        {
            name
            for cls in (EndpointJudge, ModelJudge)
            for name, parameter in inspect.signature(cls).parameters.items()
            if parameter.kind is not inspect.Parameter.VAR_KEYWORD
        }
    )
    for name, value in given.items():
        if name in known:
            continue
        if any(word in str(name).lower() for word in _SECRET):
            raise OptionError(
                f"judge: {name}: secrets are not allowed in options, because these are saved; use an environment "
                "variable, and set api_key_env to its name"
            )
        close = did_you_mean(str(name), known)
        raise OptionError(f"judge: {setting(str(name), value)}: unknown key{close}; known keys: {listing(known)}")
    missing = [name for name in ("base_url", "model") if name not in given]
    if missing:
        raise OptionError(f"judge: {listing(missing)} is missing; set base_url (http://HOST:PORT/v1) and model")
    try:
        return EndpointJudge(**given)
    except OptionError as error:
        raise OptionError(f"judge: {error}") from None
