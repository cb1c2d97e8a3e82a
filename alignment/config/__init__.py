"""Options, their conversion and checks, and the DeepSpeed JSON made from them.

Nothing here imports torch, DeepSpeed or transformers when it is loaded, so that a bad option is
refused within a second.
"""
