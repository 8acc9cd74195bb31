"""Where knobs come from besides Python: a YAML file and environment variables.

Both give knob -> value with the values read strictly, and complaints that name the file
or the variable. Combinations of knobs are SmpConfig's business, because the environment
may override a file.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Hashable, Iterable, Mapping
from typing import Any

import yaml

from smp_core.config.rules import unknown_knob
from smp_core.config.values import Reader, nearest_name
from smp_core.outside import read_yaml

logger = logging.getLogger("smp")

VARIABLE_PREFIX = "SMP_"
CONFIG_FILE_VARIABLE = "SMP_CONFIG_FILE"
# SMP_* variables that other parts of torch-smp read and that are no knobs.
OTHER_VARIABLES = (
    CONFIG_FILE_VARIABLE,
    "SMP_RANKS_PER_NODE",
    "SMP_LINKS",
    "SMP_MEMORY_FOLDER",
    "SMP_VERIFY",
)
YAML_SECTION = "smp_config"


def knobs_in_yaml(
    path: str | os.PathLike[str], readers: Mapping[str, Reader]
) -> dict[str, Any]:
    """Return knob -> value in the `smp_config:` section of a YAML file, or at its top
    level when it has no such section.

    Args:
        readers: knob -> the reader of its value.

    Raises:
        ValueError: no such file, no valid YAML, no section and no knobs, a key written
            twice, an unknown knob, or a value that is not allowed.
    """
    # Keys written twice are refused while the file is read.
    document = read_yaml(path, _UniqueKeyLoader)
    try:
        return {
            knob: readers[knob](knob, value)
            for knob, value in _section(document, readers).items()
        }
    except ValueError as error:
        raise ValueError(f"{os.fspath(path)}: {error}") from None


def knobs_in_environment(
    environ: Mapping[str, str], readers: Mapping[str, Reader]
) -> tuple[dict[str, Any], dict[str, str]]:
    """Return knob -> value, and knob -> where it was written, in SMP_<KNOB> variables
    and the file SMP_CONFIG_FILE names.

    Args:
        readers: knob -> the reader of its value.

    Raises:
        ValueError: a value is not allowed, or a variable looks like a misspelt knob.
    """
    # The file, then variables, which win over it.
    values: dict[str, Any] = {}
    origins: dict[str, str] = {}
    if CONFIG_FILE_VARIABLE in environ:
        path = environ[CONFIG_FILE_VARIABLE]
        values = knobs_in_yaml(path, readers)
        origins = dict.fromkeys(values, os.path.basename(path))
    for variable in sorted(
        name for name in environ if name.startswith(VARIABLE_PREFIX)
    ):
        # Variables are upper case; others of the same beginning are none of ours.
        knob = variable.removeprefix(VARIABLE_PREFIX).lower()
        if variable in OTHER_VARIABLES:
            continue
        if knob in readers and variable.isupper():
            values[knob] = readers[knob](knob, environ[variable])
            origins[knob] = variable
            continue
        # Close to a knob: a typing error, which would otherwise have no effect.
        near = nearest_name(knob, readers, cutoff=0.7)
        if near:
            raise ValueError(
                f"unknown environment variable {variable}; did you mean {VARIABLE_PREFIX}{near.upper()}? "
                f"If it belongs to another program, unset it here"
            )
        logger.warning(
            "environment variable %s is not a knob of torch-smp and has no effect here",
            variable,
        )
    return values, origins


def _section(document: Any, known: Iterable[str]) -> dict[str, Any]:
    expected = f"write the knobs under a `{YAML_SECTION}:` section, as in `{YAML_SECTION}: {{shard_degree: node}}`"
    # A file of its own has the knobs at the top; a larger one has a section for them.
    if not isinstance(document, dict):
        raise ValueError(f"the file holds no mapping of knobs; {expected}")
    if YAML_SECTION in document:
        knobs = document[YAML_SECTION]
        if knobs is None:
            return {}
        if not isinstance(knobs, dict):
            raise ValueError(
                f"{YAML_SECTION}={knobs!r} is not a mapping of knobs; {expected}"
            )
        # They may be another program's, of the same name.
        outside = [key for key in document if key in known]
        if outside:
            logger.warning(
                "%s beside `%s:` has no effect on torch-smp; write it inside if it is a knob",
                ", ".join(map(repr, outside)),
                YAML_SECTION,
            )
    elif any(key in known for key in document):
        knobs = document
    else:
        found = ", ".join(map(str, document)) or "nothing"
        raise ValueError(
            f"no `{YAML_SECTION}:` section and no knob at the top level (found: {found}); {expected}"
        )
    for name in knobs:
        if name not in known:
            raise unknown_knob(str(name), known)
    return knobs


class _UniqueKeyLoader(yaml.SafeLoader):
    """PyYAML keeps the last of two equal keys in silence; here that is an error."""

    def construct_mapping(
        self, node: yaml.MappingNode, deep: bool = False
    ) -> dict[Hashable, Any]:
        # Merged keys ("<<") may come several times.
        seen: set[str] = set()
        for key, _ in node.value:
            if key.value in seen and key.tag != "tag:yaml.org,2002:merge":
                raise yaml.constructor.ConstructorError(
                    None, None, f"{key.value!r} is written twice", key.start_mark
                )
            seen.add(key.value)
        return super().construct_mapping(node, deep)
