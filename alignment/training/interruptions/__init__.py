"""What ends a run or repeats a step: requests to stop, bad steps, overflows, hangs."""
