"""Tokenized rows in the form that scripts written for TRL expect."""
