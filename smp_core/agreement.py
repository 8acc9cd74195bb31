"""Whether all ranks were given the same configuration.

Asked before the first process group is made by it: a rank with another degree makes other groups, one with another
payload sends other bytes, and then all wait for one another in different collectives until a timeout ends them.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TypeVar

import torch.distributed as dist
import xxhash

from smp_core.config import SmpConfig
from smp_core.links import LINKS_VARIABLE
from smp_core.topology import by_rank

# A host's own affair: what does not fit there stays on the device.
_OF_A_HOST = "activation_offloading_host_gib"

T = TypeVar("T")


def of_all_ranks(own: T) -> list[T]:
    """What every rank gave, in rank order. Collective over the world; without a process group there is one rank."""
    if not dist.is_initialized() or dist.get_backend() == "fake":  # a dry run of one rank, which hears from nobody
        return [own]
    everyone = [own] * dist.get_world_size()
    dist.all_gather_object(everyone, own)
    return everyone


def require_agreement(config: SmpConfig) -> None:
    """Compare the knobs in effect, and the file that ``SMP_LINKS`` names. Collective over the world.

    Raises:
        ValueError: something differs; the same error on all ranks, which names it, its values and who has them.
    """
    own = {knob: value for knob, value in config.effective().items() if knob != _OF_A_HOST}
    if callable(config.wrap):  # the text of an object may have its address
        own["wrap"] = getattr(config.wrap, "__qualname__", type(config.wrap).__qualname__)
    own[LINKS_VARIABLE] = _links_file()
    everyone = of_all_ranks(own)
    differences = [
        f"{knob} differs between ranks ({by_rank([said[knob] for said in everyone])})"
        for knob in own
        if any(said[knob] != own[knob] for said in everyone)
    ]
    if differences:
        raise ValueError(f"{'; '.join(differences)}; start every rank with the same configuration")


def _links_file() -> str | None:
    path = os.environ.get(LINKS_VARIABLE)
    if not path:
        return None
    try:
        return f"a file with the digest {xxhash.xxh3_64_hexdigest(Path(path).read_bytes())}"
    except OSError as error:
        return f"{path}: {error.strerror}"
