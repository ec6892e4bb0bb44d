"""Settings that all tests share."""

from __future__ import annotations

import hypothesis

# Time limits for single examples fail on a busy machine and say nothing about the code. Everything else stays as
# hypothesis chooses it, which in CI is: the same examples every time.
hypothesis.settings.register_profile("castwise", parent=hypothesis.settings(), deadline=None)
hypothesis.settings.load_profile("castwise")
