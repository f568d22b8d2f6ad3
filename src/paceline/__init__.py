"""Data-parallel training whose result does not depend on the workers."""
