"""Tokenised rows as scripts that were written for TRL look at them."""
