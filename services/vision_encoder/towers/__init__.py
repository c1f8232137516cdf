"""Towers on a CPU by Tessera's own kernels: the arithmetic of transformers' modules, without the modules."""
