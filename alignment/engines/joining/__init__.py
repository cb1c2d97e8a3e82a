"""Before ranks join the process group: that they can meet, by which addresses, and one line where they cannot."""
