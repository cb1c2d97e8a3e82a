"""What several tests share: models, runs, comparisons, doubles, and the programs that ranks execute."""
