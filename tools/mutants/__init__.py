"""Random mutants: what the tests notice of small changes that nobody chose. ``make mutants`` runs them."""
