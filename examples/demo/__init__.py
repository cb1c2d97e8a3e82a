"""`make demo`: train a small model from scratch, align it with KTO, CPO and Online DPO, and check the results."""
