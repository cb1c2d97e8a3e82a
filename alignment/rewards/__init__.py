"""Scores of completions and verdicts on pairs: functions and judges of a user, reward models, their weighted sum."""
