"""Without a GPU the kernels run in Triton's interpreter, which must be chosen before triton is first imported."""

import os

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
