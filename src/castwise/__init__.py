"""Castwise: automatic mixed precision, and proof that the result is right."""
