"""Context parallelism: sequences that several ranks hold together (docs/context-parallelism.md)."""
