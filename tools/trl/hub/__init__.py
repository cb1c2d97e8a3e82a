"""A local Hub with tiny random models and small datasets under the names that TRL's tests and scripts use."""
