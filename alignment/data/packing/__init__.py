"""Several rows in the place of one: which of them go together, and what batches are made of."""
