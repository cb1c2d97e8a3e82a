"""Send signals to launchers and workers of real runs, and check that they exit in time and resume bitwise."""
