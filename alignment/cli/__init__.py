"""The command-line interface: dispatch (``commands``), argument parsing, help, output, and a module per command.

A command is a function ``main(argv, program)``. ``argv`` are the arguments without the program name, by default those
of this process; ``program`` is the name of the program in usage lines. It ends with ``SystemExit``.
"""
