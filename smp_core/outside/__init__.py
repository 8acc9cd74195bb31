"""What comes from outside and goes there: files that others may have made, the terminal, other packages."""
