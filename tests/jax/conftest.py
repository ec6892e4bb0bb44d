"""Two virtual CPU devices, for what is sharded; asked for before JAX starts its backend."""

from __future__ import annotations

import importlib.util
import pathlib
import sys

import pytest

jax = pytest.importorskip("jax")
jax.config.update("jax_num_cpu_devices", 2)
# The tests compile hundreds of small functions and run each once.
jax.config.update("jax_disable_most_optimizations", True)


@pytest.fixture(scope="session")
def formats_of_products():
    """A function that says which formats the products of ``f(*args)`` have, at any depth: ``{"bfloat16"}``."""
    path = pathlib.Path(__file__).with_name("functions.py")
    spec = importlib.util.spec_from_file_location("castwise_jax_functions", path)
    assert spec is not None and spec.loader is not None
    if spec.name not in sys.modules:
        sys.modules[spec.name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[spec.name])
    products = sys.modules[spec.name].products
    return lambda f, *args: set(products(jax.make_jaxpr(f)(*args).jaxpr))
