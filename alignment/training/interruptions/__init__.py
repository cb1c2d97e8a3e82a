"""What ends a run or makes it do something again: stops that are asked for, faults of the numbers, hangs."""
