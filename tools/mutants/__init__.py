"""Random mutation testing: whether the tests detect small random changes. ``make mutants`` runs it."""
