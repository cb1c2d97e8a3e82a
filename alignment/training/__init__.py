"""The trainer, the training loop and the evaluation that all methods share."""

from __future__ import annotations
