"""Kill runs repeatedly at planned points, and check that each restart continues as if nothing had happened."""
