"""Checks of the CUDA kernels against float64 oracles; ``scripts/check_cuda.py`` runs them."""
