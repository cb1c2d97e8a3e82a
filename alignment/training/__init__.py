"""One trainer, one loop, one evaluation: what every method shares."""

from __future__ import annotations
