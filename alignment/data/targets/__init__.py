"""Select the tokens of a row that contribute to the loss, by SFT options or by columns of tokenized rows."""
