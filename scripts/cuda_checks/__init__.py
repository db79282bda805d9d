"""Parts of the checks and measurements on a CUDA device; ``check_cuda*.py`` and ``measure_cuda*.py`` run them."""
