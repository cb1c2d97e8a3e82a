"""A reward model on several ranks, which score unequal numbers of samples.

The file holds ``{"reward_model": path, "samples": [[[prompt, completion], …] per rank]}``.
Each rank writes its scores, and the error of a batch that fails on the last rank only, to ``scores-RANK.json``.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from support.data_tokenizers import char_tokenizer
from support.helpers import zero

from alignment import OnlineDPOConfig
from alignment.cli.guarded import guarded
from alignment.config.dtypes import plan_dtypes
from alignment.config.errors import RewardError
from alignment.rewards.reward_model import ClassifierReward
from alignment.rewards.samples import Samples
from alignment.run.ranks import rank, world_size

PICKY = (
    "{% for m in messages %}{% if m.content == 'no' %}{{ raise_exception('refused') }}{% endif %}"
    "{{ m.content }}{% endfor %}"
)


def samples(pairs: list[list[Any]]) -> Samples:
    """Prompts with their completions only."""
    size = len(pairs)
    prompts, completions = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
    places = [f"row {number + 1}" for number in range(size)]
    return Samples(prompts, completions, [[]] * size, [True] * size, {}, places, [{}] * size)


def scored(spec: dict[str, Any], folder: Path) -> dict[str, Any]:
    """This rank's scores with every placement, and its error when another rank fails."""
    options = OnlineDPOConfig(output_dir=str(folder / "unused"))
    common: dict[str, Any] = {"options": options, "dtypes": plan_dtypes(options, zero(0)), "batch_size": 2}
    found: dict[str, Any] = {}
    offload = zero(3, parameters=True)
    # Weights are gathered for every forward: a rank with fewer of them would leave the other waiting.
    offload["zero_optimization"] |= {"stage3_max_live_parameters": 0, "stage3_max_reuse_distance": 0}
    for placement, mapping in {"replica": zero(0), "offload": offload}.items():
        reward = ClassifierReward(
            spec["reward_model"], char_tokenizer(template=PICKY), placement=placement, deepspeed=mapping, **common
        )
        found[placement] = reward.score(samples(spec["samples"][rank()]))
        word = "no" if rank() == world_size() - 1 else "yes"
        try:
            reward.score(samples([[[{"role": "user", "content": word}], [{"role": "assistant", "content": "a"}]]]))
        except RewardError as error:
            found[f"{placement} error"] = str(error)
        found[f"{placement} afterwards"] = reward.score(samples(spec["samples"][rank()]))
        reward.close()
    return found


def main() -> None:
    """Score, and write the results."""
    path = Path(sys.argv[1])
    spec = json.loads(path.read_text())
    (path.parent / f"scores-{rank()}.json").write_text(json.dumps(scored(spec, path.parent)))


if __name__ == "__main__":
    sys.exit(guarded(main))
