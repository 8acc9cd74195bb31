"""The watch over ranks: those that wait, part, die, are told to leave or have fewer batches."""
