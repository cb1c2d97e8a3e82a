"""``make renames``: the contract tests of ``alignment/internals/`` notice when a library renames what is touched."""
