"""Model shapes by short names: the fields of published configurations, as Transformers'
AutoConfig takes them.

known_models.json has those of the config.json files of the releases; GPT-2's four sizes
and that of 30 billion which SMP's authors train (width 7,168, 48 layers, 64 heads).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from smp_core.outside import read_json

KNOWN_MODELS: Mapping[str, Mapping[str, Any]]
KNOWN_MODELS = read_json(Path(__file__).with_suffix(".json"))

_SUFFIXES = re.compile(r"-(instruct|it|base|hf|chat|v0\.1)$")


def known_model(words: str) -> Mapping[str, Any] | None:
    """Return the fields of a short name, or of a name on the hub that differs from one
    by its owner, capitals, and a suffix that changes no shapes; None: of neither."""
    # Suffixes are taken off one at a time, as in "-Chat-HF".
    name = words.rpartition("/")[2].lower().removeprefix("meta-")
    while name not in KNOWN_MODELS and _SUFFIXES.search(name):
        name = _SUFFIXES.sub("", name)
    return KNOWN_MODELS.get(name)
