"""What a run will be made of, decided before anything is loaded."""
