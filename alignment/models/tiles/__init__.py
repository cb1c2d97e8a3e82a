"""Compute log-probs, statistics and gradient coefficients for one tile of logits, with torch or Triton kernels.

``plain`` runs everywhere and is the reference implementation for ``fused``, the host code of ``kernels``; ``choice``
selects one of the two. Autograd is handled in ``models.logprobs``.
"""
