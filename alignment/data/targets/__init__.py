"""Which tokens of a row are learned: by the options of supervised fine-tuning, or by columns of tokenised rows."""
