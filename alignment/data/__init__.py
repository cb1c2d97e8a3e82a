"""Data: rows of preference data in, token ids out.

The trip of a row: ``sources`` and ``streams`` (a file, folder, hub name or object becomes a dataset) → ``columns`` (by
the names that are expected) → ``messages`` and ``formats`` (a row becomes a canonical, checked one) → ``tokenization``
(text becomes ids, prompt and completion apart) → ``prepare`` (all of it, once, cached on disk) → ``mixture`` (several
datasets become one). Window planning and batching follow in ``lengths``, ``windows`` and ``batching``; what scorers
are told of a prompt is in ``prompt_rows``, what of it can be kept in ``storable``.
"""
