"""Print the threads that the user has asked for, as a rank that a launcher has started sees it."""

from alignment.engines.cores import users_threads

print(f"threads {users_threads()}", flush=True)
