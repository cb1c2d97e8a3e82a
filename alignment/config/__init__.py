"""Options, their parsing and checking, and the DeepSpeed JSON made from them.

The lowest floor: nothing here imports torch, DeepSpeed or transformers when it is loaded, so that a bad option is
refused within a second.
"""
