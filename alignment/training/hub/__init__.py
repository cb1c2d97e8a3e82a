"""Uploads to the Hugging Face hub: what of a run is published, by whom, and what happens where it fails."""
