"""Print the number of threads that the user requested, as seen by a rank of a launcher."""

import os

from alignment.engines.cores import users_threads

# A single write, so that the lines of two ranks do not mix.
os.write(1, f"threads {users_threads()}\n".encode())
