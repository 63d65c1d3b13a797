"""``python -m pipetrain``: see ``pipetrain.cli``."""

from __future__ import annotations

import sys

from pipetrain.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
