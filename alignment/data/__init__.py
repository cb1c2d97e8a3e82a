"""Data loading and preparation: from rows of preference data to token IDs.

The steps: ``sources`` and ``readers`` load a file, folder, Hub name, object or stream into a dataset; ``columns``
selects and renames its columns; ``messages`` and ``formats`` convert rows to canonical, validated rows;
``tokenization`` and ``truncation`` convert text to the token IDs of prompts and completions; ``row_mapper`` and
``prepare`` run all of this once and cache the result on disk; ``mixture`` combines several datasets; ``windows`` plans
the rows of each optimizer step; ``batching`` collates them into tensors. ``json_columns`` stores the data that reward
functions get for a prompt.
"""
