"""The demo's numbers in one place. What the table must reach is in :mod:`examples.demo.verdict`."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class StartSettings:
    """The model (1.4 million parameters) and its warm start; any change makes a kept start model stale."""

    hidden_size: int = 192
    layers: int = 3
    heads: int = 4
    intermediate_size: int = 512
    rows: int = 6400
    epochs: float = 2.5
    batch: int = 32
    learning_rate: float = 3e-3


@dataclass(frozen=True)
class PreferenceSettings:
    """One pass over ``rows``. The rates are for a tiny model that has hardly been trained: far above a user's."""

    rows: int
    batch: int
    beta: float
    learning_rate: float


@dataclass(frozen=True)
class OnlineSettings(PreferenceSettings):
    """``rows`` are requests alone; ``completions`` are sampled for each."""

    completions: int


@dataclass(frozen=True)
class RewardSettings:
    """One pass over ``rows`` pairs; any change makes a kept reward model stale."""

    rows: int = 800
    batch: int = 16
    learning_rate: float = 2e-4
    centring: float = 0.01  # without it, warm and curt would lie anywhere, as long as they are apart


@dataclass(frozen=True)
class Settings:
    """Everything that a run depends on; what belongs to one model is under the name of its stage."""

    seed: int = 0
    held_out: int = 256
    start: StartSettings = field(default_factory=StartSettings)
    reward: RewardSettings = field(default_factory=RewardSettings)
    kto: PreferenceSettings = field(default_factory=lambda: PreferenceSettings(3200, 32, 1.0, 4e-4))
    cpo: PreferenceSettings = field(default_factory=lambda: PreferenceSettings(1600, 16, 1.0, 4e-4))
    online_dpo: OnlineSettings = field(default_factory=lambda: OnlineSettings(1600, 16, 1.0, 2e-4, completions=4))
    temperature: float = 1.0
    max_new_tokens: int = 40
