"""Data: rows of preference data in, token ids out.

The trip of a row: ``sources`` and ``readers`` (a file, folder, hub name, object or stream becomes a dataset) →
``columns`` (by the names that are expected) → ``messages`` and ``formats`` (a row becomes a canonical, checked one) →
``tokenization`` and ``truncation`` (text becomes ids, prompt and completion apart) → ``row_mapper`` and ``prepare``
(all of it, once, cached on disk) → ``mixture`` (several datasets become one) → ``windows`` (which rows make up each
optimizer step) → ``batching`` (their tensors). What reward functions get of a prompt's row is in ``json_columns``.
"""
