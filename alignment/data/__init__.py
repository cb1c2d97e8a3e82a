"""Data loading and preparation: from rows of preference data to token IDs.

The steps: ``sources`` and ``readers`` load a file, folder, Hub name, object or stream into a dataset; ``columns``
selects and renames its columns; a kind of rows in ``kinds`` converts rows of any accepted format to text, with
``messages``; ``tokenization`` converts text to the token IDs of prompts and completions, and truncates them;
``prepare`` runs all of this once and caches the result on disk; ``mixture`` combines several datasets; ``windows``
plans the rows of each optimizer step; the kind collates them into tensors, with ``batching``.
"""
