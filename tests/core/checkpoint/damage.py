"""What is changed in a checkpoint behind its back."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import smp_core.checkpoint.layout as layout
from smp_core.checkpoint.layout import digest_of


def rewrite_manifest(path: Path, content: dict[str, object]) -> None:
    """Write a manifest with a fitting digest of itself, as someone who edits on purpose
    could."""
    content.pop("manifest_digest", None)
    content["manifest_digest"] = layout.digest_of(
        json.dumps(content, sort_keys=True, separators=(",", ":")).encode(), "xxh3"
    )
    (path / "manifest.json").write_text(json.dumps(content))


Edit = Callable[[dict[str, Any]], object]


def edited(path: Path, edit: Edit, file: str = "manifest.json") -> Path:
    """Edit a JSON file of a checkpoint, with sizes and digests that fit, as an attacker
    would."""
    content = json.loads((path / file).read_bytes())
    edit(content)
    return (
        replaced(path, file, json.dumps(content).encode())
        if file != "manifest.json"
        else _manifest(path, content)
    )


def replaced(path: Path, file: str, data: bytes) -> Path:
    """Replace a file, and put its size and digest into the manifest."""
    (path / file).write_bytes(data)
    manifest = json.loads((path / "manifest.json").read_bytes())
    manifest["files"][file].update(bytes=len(data), digest=digest_of(data, "xxh3"))
    return _manifest(path, manifest)


def _manifest(path: Path, content: dict[str, Any]) -> Path:
    rewrite_manifest(path, content)
    return path
