"""A local hub: tiny random models, and rows of the same shapes, under the names that TRL's tests and scripts use."""
