"""Whether an error is that of a collective which has lost its peer, or a rank's own."""

from __future__ import annotations

import os
import traceback

DEVICE_STOPPED = "device-side assert"
"""What the error of an accelerator says whose own check has failed."""
# Parts of names of files that call collectives (what torch compiles is in a folder of
# its own), and of those that load data.
_COLLECTIVES = (
    *(
        os.path.join(os.sep, name, "")
        for name in ("torch", "smp_core", "lightning_smp", "accelerate_smp")
    ),
    "torchinductor",
)
_LOADERS = os.path.join("torch", "utils", "data", "")


def looks_like_a_lost_peer(error: BaseException) -> bool:
    """Return whether an error came from a collective that lost its peer, and not from
    this rank itself."""
    text = str(error).lower()
    own = (
        "out of memory",
        "calloc",
        "unhandled cuda error",
        "invalid usage",
        "peer access",
        DEVICE_STOPPED,
    )
    # An error of this rank alone can mention NCCL too: such texts decide first.
    if any(sign in text for sign in own):
        return False  # also where NCCL says so
    if not isinstance(error, RuntimeError):
        return False
    # The transports say their names. What waits for them may be a user's line:
    # `work.wait()` has no frame of torch's.
    if "nccl" in text or "gloo" in text:
        return True
    signs = ("connection", "timed out", "timeout", "broken pipe", "remote", "peer")
    return any(sign in text for sign in signs) and _comes_from_a_collective(error)


def _comes_from_a_collective(error: BaseException | None) -> bool:
    """Return whether an error, or one that it was raised from, may be a collective's,
    by the file that raised it. A database or a data loader has timeouts and connections
    as well."""
    while error is not None:
        frames = traceback.extract_tb(error.__traceback__)
        file = frames[-1].filename if frames else _COLLECTIVES[0]
        loads = _LOADERS in file or "dataloader" in str(error).lower()
        if not loads and any(part in file for part in _COLLECTIVES):
            return True
        error = error.__cause__ or error.__context__
    return False
