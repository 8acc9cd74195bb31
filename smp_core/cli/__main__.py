"""`python -m smp_core.cli`."""

from __future__ import annotations

from smp_core.cli import main

if __name__ == "__main__":
    main()
