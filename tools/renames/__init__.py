"""``make renames``: check that the contract tests of ``alignment/internals/`` detect renames in libraries."""
