"""Print the number of threads that the user requested, as seen by a rank of a launcher."""

from alignment.engines.cores import users_threads

print(f"threads {users_threads()}", flush=True)
