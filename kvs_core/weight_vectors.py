"""Vectors of a model file: norms, biases, routing. Small, and float32 on every device."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from gguf.quants import dequantize

from kvs_core.errors import ModelFileError
from kvs_core.messages import show_text

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from kvs_core.model_file import ModelFile


def read_vector(model_file: ModelFile, name: str) -> NDArray[np.float32]:
    """A tensor as float32 [n_rows, n_cols], or [n_cols] for one of one dimension.

    Raises ModelFileError for a NaN: comparisons, such as the choice of experts, would pass over it.
    """
    values = dequantize(model_file.tensor_bytes(name), model_file.tensors[name].type)
    if np.isnan(values).any():
        raise ModelFileError(
            f"{show_text(model_file.path)}: tensor {name} holds NaN",
            path=model_file.path,
            key=name,
            hint="the file is damaged or was converted badly; use another conversion of the model",
        )
    return np.ascontiguousarray(values, dtype=np.float32)
