"""Each op of torch's OpInfo database on the device and on the CPU: the same float32 samples, the same results.

The class and its test have the names that torch's own have, because OpInfo names exceptions by them: random ops, and
those without a defined result. An op that the device lacks is an error that says so. A crash ends the run.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.testing._internal.common_device_type import instantiate_device_type_tests, ops
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.common_utils import TestCase
from torch.utils import _pytree as pytree


class TestCommon(TestCase):  # type: ignore[no-untyped-call, unused-ignore]  # from 2.15 on torch's class has a hook without types
    @ops(op_db, allowed_dtypes=(torch.float32,))  # type: ignore[untyped-decorator]  # torch's tests are untyped
    def test_compare_cpu(self, device: str, dtype: torch.dtype, op: Any) -> None:
        for sample in op.sample_inputs(device, dtype):
            on_cpu = _on_cpu((sample.input, sample.args, sample.kwargs))
            found = op(sample.input, *sample.args, **sample.kwargs)
            self.assertEqual(_on_cpu(found), op(on_cpu[0], *on_cpu[1], **on_cpu[2]), exact_device=False)


def _on_cpu(values: Any) -> Any:
    """Copies of all tensors on the CPU; a device that an op is given becomes the CPU."""
    return pytree.tree_map(_one_on_cpu, values)


def _one_on_cpu(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().cpu().clone()
    return torch.device("cpu") if isinstance(value, torch.device) else value


instantiate_device_type_tests(TestCommon, globals())  # type: ignore[no-untyped-call]  # torch's tests are untyped
