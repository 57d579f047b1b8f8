"""The Triton kernel of gTop-k against the CPU's, bit for bit.

A script: TRITON_INTERPRET=1 chooses Triton's interpreter; without it, the kernel runs on a GPU.
"""

from __future__ import annotations

import torch

from linkweave.kernels.gtopk import cpu, gpu
from tests.cpu.casting import device_for, special

device_for(gpu)
for n in (0, 1, 3, 1023, 1024, 1025, 5000):
    for fine in (True, False):
        for shift in (0, 1):  # aligned, and not
            flat = special(n + 8, n)
            want, found = flat.cpu().clone(), flat.clone()
            cpu.drop_nonfinite(torch.tensor(fine), want[shift : n + shift])
            gpu.drop_nonfinite(torch.tensor(fine).to(flat.device), found[shift : n + shift])
            if fine:
                want = flat.cpu()
            assert torch.equal(want.view(torch.int32), found.cpu().view(torch.int32)), (n, fine)
print("same bits")
