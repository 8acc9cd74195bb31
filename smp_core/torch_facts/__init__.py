"""Facts about torch: differences between versions, streams, names of wrapped modules, absent tensors, masters."""
