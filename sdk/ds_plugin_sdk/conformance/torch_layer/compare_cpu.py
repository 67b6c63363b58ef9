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


class TestCommon(TestCase):
    @ops(op_db, allowed_dtypes=(torch.float32,))  # type: ignore[untyped-decorator]  # torch's tests are untyped
    def test_compare_cpu(self, device: str, dtype: torch.dtype, op: Any) -> None:
        for sample in op.sample_inputs("cpu", dtype):
            wanted = op(sample.input, *sample.args, **sample.kwargs)
            arguments = pytree.tree_map(lambda value: _to(value, device), (sample.input, sample.args, sample.kwargs))
            found = op(arguments[0], *arguments[1], **arguments[2])
            self.assertEqual(pytree.tree_map(lambda value: _to(value, "cpu"), found), wanted, exact_device=False)


def _to(value: Any, device: str) -> Any:
    """A copy on a device; a device that an op is given becomes the other one."""
    if isinstance(value, torch.Tensor):
        return value.detach().to(device)
    return torch.device(device) if isinstance(value, torch.device) else value


instantiate_device_type_tests(TestCommon, globals())  # type: ignore[no-untyped-call]  # torch's tests are untyped
