"""The kinds of rows that methods train on, one file each. A method has a kind; nothing else depends on which one.

A new kind is a new file with a subclass of :class:`~alignment.data.kinds.base.Kind`, in the package or outside.
"""
