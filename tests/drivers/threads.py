"""Print the number of threads requested by the user, as seen by a rank started by a launcher."""

from alignment.engines.cores import users_threads

print(f"threads {users_threads()}", flush=True)
