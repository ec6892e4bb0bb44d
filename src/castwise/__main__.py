"""``python -m castwise`` is the command ``castwise``."""

from __future__ import annotations

import sys

from castwise.cli import main

sys.exit(main())
