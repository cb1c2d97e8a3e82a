"""Pure loss functions: tensors in, per-row losses and detached rewards out.

They are independent of engines, ranks, batches and files. Every function returns one value per row, never a mean; the
caller computes the mean of a window over all its micro-batches and ranks.
"""
