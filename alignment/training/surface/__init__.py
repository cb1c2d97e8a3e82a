"""Members of transformers' and TRL's trainers that existing scripts use, other than training and evaluation."""
