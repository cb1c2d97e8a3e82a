"""One tile of logits at a time: log-probs, statistics and gradient coefficients, by torch or by Triton kernels.

``plain`` runs everywhere and is the reference of ``fused``, the host side of ``kernels``; ``choice`` decides between
the two. None of them knows autograd: that is ``models.logprobs``.
"""
