"""Functions of TVM-FFI's C interface, compiled from C: what they are given, and that programs launch them."""

import shutil
import subprocess

import pytest
import torch

pytest.importorskip("triton")
from sagebwd.cache import PLANS

ffi = pytest.importorskip("sagebwd.kernels.runtime.ffi")
from sagebwd.kernels.runtime import program  # noqa: E402

# out[i, j] = factor * x[i, j] by their own strides, and the sums of shapes and strides in told; fails for factor 0
SOURCE = """
#include <stdint.h>
typedef struct { float *data; int32_t device_type, device_id, ndim; uint8_t code, bits; uint16_t lanes;
                 int64_t *shape, *strides; uint64_t byte_offset; } Tensor;
typedef struct { int32_t type; uint32_t padding; union { int64_t integer; double number; Tensor *tensor; }; } Any;
int __tvm_ffi_scale(void *self, const Any *arguments, int32_t count, Any *result) {
  const Any *x = arguments, *out = arguments + 1, *factor = arguments + 3, *told = arguments + 4;
  if (count != 7 || x->type != 7 || arguments[2].type != 0 || factor->type != 3 || arguments[5].type != 1) return 1;
  if (factor->number == 0) return 1;
  for (int64_t i = 0; i < x->tensor->shape[0]; i++)
    for (int64_t j = 0; j < x->tensor->shape[1]; j++)
      out->tensor->data[i * out->tensor->strides[0] + j * out->tensor->strides[1]] =
        factor->number * x->tensor->data[i * x->tensor->strides[0] + j * x->tensor->strides[1]];
  int32_t *note = (int32_t *)told->tensor->data;
  note[0] = x->tensor->ndim, note[1] = x->tensor->code, note[2] = x->tensor->bits, note[3] = x->tensor->device_type;
  note[4] = arguments[5].integer, note[5] = arguments[6].integer, note[6] = told->tensor->code;
  return 0;
}
"""
pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")


@pytest.fixture
def scale(tmp_path, monkeypatch):
    """The function, with no library of TVM-FFI's."""
    monkeypatch.setattr(ffi, "runtime", lambda: None)
    monkeypatch.setattr(ffi, "_raised", lambda: RuntimeError("it failed"))
    path = tmp_path / "scale.so"
    command = ["cc", "-shared", "-fPIC", "-x", "c", "-", "-o", path]
    subprocess.run(command, input=SOURCE, text=True, check=True)
    return ffi.Function(path, "scale")


def test_arguments_arrive(scale):
    x, out, told = torch.randn(3, 4).t(), torch.empty(4, 3), torch.zeros(7, dtype=torch.int32)
    program.launch(scale, (), x, out, None, 2.0, told, 5)
    torch.testing.assert_close(out, 2 * x)
    assert told.tolist() == [2, 2, 32, 1, 5, 0, 0]


def test_a_failure_raises(scale):
    with pytest.raises(RuntimeError, match="it failed"):
        program.launch(scale, (), torch.ones(1, 1), torch.ones(1, 1), None, 0.0, torch.ones(7), 5)


def test_programs_launch_functions(scale):
    """Inputs, an output that is a view and scratch of another type."""

    def call(x):
        torch.empty(5)
        told, both = torch.empty(8, dtype=torch.int32), torch.empty(2, 4, 3)
        program.launch(scale, (), x, both[1].t(), None, 3.0, told[1:], 5)
        return (both[1].t(),)

    for _ in range(4):
        x = torch.randn(3, 4)
        (out,) = program.run(call, x)
        torch.testing.assert_close(out, 3 * x)
    assert len(PLANS) == 1
