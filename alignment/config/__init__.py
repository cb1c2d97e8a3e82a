"""Options, their conversion and checks, and the DeepSpeed JSON built from them.

Importing this package does not import torch, DeepSpeed or transformers, so that an invalid option is reported within a
second.
"""
