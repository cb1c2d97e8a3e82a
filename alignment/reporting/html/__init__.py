"""The run report as one self-contained HTML page: curves, tables and text, without external resources or scripts."""
