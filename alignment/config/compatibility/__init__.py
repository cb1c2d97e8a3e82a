"""Options of TRL and of transformers' ``TrainingArguments`` that scripts set, and what becomes of each here.

A script for TRL sets options that this project has under the same name, that it had under another one, that ask for
what is done in any case, or that ask for what is not done. The first are in :mod:`alignment.config` and
:mod:`alignment.methods`; the rest are here, each with its reason. ``docs/reference/trl-options.md`` is printed from
them.
"""
