"""FP8, as one of the subjects. There is nothing to settle: which layers compute in FP8
is found when they are converted."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from smp_core.config import FP8_APART
from smp_core.plan import Finding, Subject
from smp_core.torch_facts import device_multiplies_fp8


class Fp8(Subject):
    """Matrix products in FP8, as one of the subjects."""

    name = "fp8"
    page = "fp8.md"
    knobs = ("fp8",)
    optional = True
    apart = FP8_APART  # refused where knobs are read
    part = "fp8"

    def machine(self) -> Iterator[Finding]:
        """Look whether the device has FP8 tensor cores."""
        if torch.cuda.is_available():
            capable = device_multiplies_fp8(
                torch.device("cuda", torch.cuda.current_device())
            )
            found = "yes" if capable else "needs 8.9"
            yield Finding.unless(
                capable, "FP8", found, "leave fp8 out; products are emulated"
            )


FP8 = Fp8()
