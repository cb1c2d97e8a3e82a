"""Options of TRL and of transformers' ``TrainingArguments`` that scripts set, and how each is treated.

A script for TRL sets options that exist here under the same name, or under another name, that have no effect, or that
are not supported. The first are declared in :mod:`alignment.config` and :mod:`alignment.methods`; the others are
declared here, each with a reason. ``docs/reference/trl-options.md`` is generated from them.
"""
