"""The errors a person can mend.

Every message is one line that names the file, row, key and value at fault and what to set instead; the command line
prints it as it is, without a traceback. Anything else that is raised is a defect of this project.
"""

from __future__ import annotations


class AlignmentError(ValueError):
    """Base of every error that is written for the user. The message is the whole explanation."""


class OptionError(AlignmentError):
    """An option, or a combination of options, that cannot be used."""


class DataError(AlignmentError):
    """A data file, row or column that cannot be used."""


class ModelError(AlignmentError):
    """A checkpoint, tokenizer or model object that cannot be used."""


class OutputError(AlignmentError):
    """A folder or file that cannot be written."""


class TrainingError(AlignmentError):
    """A run that had to stop: the loss became non-finite, or a step could not be taken."""


class RewardError(AlignmentError):
    """A reward function or judge that raised, or returned what is no score or verdict."""
