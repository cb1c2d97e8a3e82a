"""Monitoring of a process and its peers: current activity, stop requests, silent ranks and hangs."""
