"""Norms of sparse and of half-precision gradients."""

import numpy as np
import pytest
import torch

from accumviz.recorder import transfer


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_norm_of_half_precision_is_a_single_precision_number(dtype: torch.dtype) -> None:
    half = torch.tensor([60000.0, 60000.0, 1 / 3], dtype=dtype), torch.tensor([1 / 3, 1 / 7], dtype=dtype)
    found = transfer.device_norms(half)
    assert transfer.host_norms(half) == pytest.approx([float(n) for n in found], rel=1e-6)
    np.testing.assert_allclose([float(n) for n in found], [float(x.double().norm()) for x in half], rtol=1e-6)
