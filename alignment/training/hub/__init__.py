"""Uploads to the Hugging Face Hub: what is uploaded, by which process, and how failures are handled."""
