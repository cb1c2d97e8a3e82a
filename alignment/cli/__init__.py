"""The command-line interface: dispatch (``commands``), argument parsing, help, output, and a module per command."""
