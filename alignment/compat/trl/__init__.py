"""The only place that knows TRL: its options, its trainers' arguments and members, and what its scripts import."""
