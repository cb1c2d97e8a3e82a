"""Pure loss functions: tensors in, per-row losses and detached rewards out.

Nothing here knows of engines, ranks, batches or files. Every function returns one value per row, never a mean: that of
a window is taken over all micro-batches and ranks at once by whoever holds the counts.
"""
