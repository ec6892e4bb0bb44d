"""Two virtual CPU devices, for what is sharded; asked for before JAX starts its backend."""

from __future__ import annotations

import pytest

jax = pytest.importorskip("jax")
jax.config.update("jax_num_cpu_devices", 2)
# The tests compile hundreds of small functions and run each once.
jax.config.update("jax_disable_most_optimizations", True)
