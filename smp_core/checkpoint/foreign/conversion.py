"""The conversion of other programs' checkpoints into ours and back: one process, one
tensor at a time, no code run from any file.

In: Hugging Face safetensors folders, torch.distributed.checkpoint (DCP) folders,
Lightning `.ckpt` files, Lightning's sharded folders, Accelerate's FSDP2 folders. Out:
the last four (safetensors and `.ckpt`: see full_state.consolidate). SageMaker SMP's
`partial` folders are refused: their layout is not published.
"""

from __future__ import annotations

import itertools
import logging
import pickle
import re
import stat
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from smp_core.checkpoint.dtypes import torch_dtype
from smp_core.checkpoint.folders.addresses import local_path
from smp_core.checkpoint.folders.leftovers import scratch_path
from smp_core.checkpoint.foreign.dcp_folder import (
    loaded,
    read_dcp_folder,
    write_dcp_folder,
)
from smp_core.checkpoint.foreign.export_names import MODEL_KEYS, export_names
from smp_core.checkpoint.foreign.torch_file import check_torch_content, check_torch_file
from smp_core.checkpoint.full_state import (
    check_free,
    discard,
    lazy_tensor,
    put_in_place,
    refuse_second_model,
)
from smp_core.checkpoint.layout import CheckpointError
from smp_core.checkpoint.opening import foreign_kind, open_checkpoint
from smp_core.checkpoint.ranks import Ranks
from smp_core.checkpoint.reader import decode_state
from smp_core.checkpoint.save_plan import LazyTensor
from smp_core.checkpoint.staging import stage
from smp_core.checkpoint.untrusted import (
    FOLDER_NAMES,
    JSON_BYTES,
    Fields,
    is_plain,
    only_checkpoint_errors,
    read_json,
)
from smp_core.checkpoint.verify import check_files
from smp_core.checkpoint.writer import SaveOptions, write_staged
from smp_core.outside import StrPath

logger = logging.getLogger("smp")

EXPORTS = ("dcp", "lightning", "accelerate")
_COMPANIONS = (".json", ".txt", ".model", ".jinja", ".py")
_COMPANION_BYTES = 64 << 20


def import_checkpoint(
    source: StrPath,
    out: StrPath,
    *,
    add_prefix: str = "",
    ties: dict[str, str] | None = None,
    overwrite: bool = False,
    allow_pickle: bool = False,
) -> str:
    """Turn another program's checkpoint into one of ours.

    Args:
        source: its file or folder; the kind of checkpoint is detected.
        out: the checkpoint folder to make.
        add_prefix: put in front of model tensor names (``"model."`` for a
            LightningModule that has it as ``self.model``), and remembered, so that
            consolidate takes it off again.
        ties: tensor name -> name of the tensor that it shares memory with, for names
            that safetensors files leave out and do not mention (``{"lm_head.weight":
            "transformer.wte.weight"}``), without the prefix.
        overwrite: replace a checkpoint at ``out``.
        allow_pickle: read values of other classes from Lightning's files. This runs
            code from them.

    Returns:
        the kind of the source.

    Raises:
        CheckpointError: not a known kind, damaged, or only readable by running code
            from it.
    """
    # Each reader returns the state, with lazy tensors where it can.
    address = local_path(source)
    kind, path = foreign_kind(address, _names(address)), Path(address)
    readers: dict[str, Callable[[], dict[str, Any]]] = {
        "huggingface": lambda: {"state_dict": _read_huggingface(path, ties or {})},
        "dcp": lambda: read_dcp_folder(address),
        "lightning-file": lambda: _torch_load(path.resolve(), allow_pickle),
        "lightning": lambda: _read_lightning_folder(path, allow_pickle),
        "accelerate": lambda: _read_accelerate(path),
    }
    if kind is None or kind not in readers:
        raise CheckpointError(
            f"{address} cannot be imported: {_why_not(kind, address)}"
        )
    if ties and kind != "huggingface":
        raise CheckpointError(
            "ties are for Hugging Face folders; the other formats keep tied tensors under all names"
        )
    with only_checkpoint_errors(address):
        state = readers[kind]()
        # Small files to keep along.
        extra_files = _companions(path) if kind == "huggingface" else {}
    # What is known of it goes into the manifest.
    metadata: dict[str, Any] = {"imported_from": kind}
    # A prefix belongs to the model's names only, so the model's key is looked for.
    key = next(
        (key for key in ("state_dict", "model") if isinstance(state.get(key), dict)),
        None,
    )
    if add_prefix:
        if key is None:
            raise CheckpointError(
                f"add_prefix={add_prefix!r}: the source has no model under state_dict or model"
            )
        state[key] = {add_prefix + name: value for name, value in state[key].items()}
        metadata["module_prefix"] = add_prefix
    step = state.get("global_step")
    if isinstance(step, int):
        metadata["step"] = step
    # A conversion is one process, whatever torch.distributed runs around it.
    options = SaveOptions(metadata, extra_files, overwrite, "xxh3")
    write_staged(
        out, lambda: stage(state, None, 0, allow_pickle), options, Ranks(alone=True)
    )
    return kind


def _names(address: str) -> list[str]:
    path = Path(address)
    if not path.exists():
        raise CheckpointError(f"there is nothing at {address}")
    if not path.is_dir():
        return []
    return sorted(
        str(file.relative_to(path))
        for file in itertools.islice(path.rglob("*"), FOLDER_NAMES)
    )


def _why_not(kind: str | None, address: str) -> str:
    if kind == "sagemaker":
        return (
            "the layout of SageMaker SMP's partial checkpoints is not published. Load it where it was made and save a "
            "full state dict (smp.save(..., partial=False)), then import that"
        )
    if kind == "accelerate-files":
        return "Accelerate's per-rank files (use_dcp=False) cannot be put together without the run that made them"
    return "it looks like no checkpoint known here: " + ", ".join(_names(address)[:5])


def _read_huggingface(folder: Path, ties: dict[str, str]) -> dict[str, LazyTensor]:
    index = folder / "model.safetensors.index.json"
    # The index of a folder of several files; one file has none, and counts where both
    # are there, as for Transformers.
    places: dict[str, str] = {}
    files = ["model.safetensors"]
    if index.is_file() and not (folder / files[0]).is_file():
        content = Fields(
            read_json(_regular(index, JSON_BYTES).read_bytes(), str(index)), str(index)
        )
        places = content.text_map("weight_map")
        files = sorted(set(places.values()))
    model: dict[str, LazyTensor] = {}
    mentioned = dict(ties)
    for name in files:
        if not is_plain(name):
            raise CheckpointError(
                f"{index} names the file {name!r}, which is not in the folder"
            )
        _regular(folder / name)
        try:
            # Headers only: values are read when they are written.
            with safe_open(folder / name, framework="pt") as file:
                facts = file.metadata() or {}
                for key in file.keys():  # noqa: SIM118  (not a dict)
                    # Another file's, of which this one holds an older copy.
                    if places.get(key, name) != name:
                        continue
                    view = file.get_slice(key)
                    dtype = torch_dtype(view.get_dtype())
                    model[key] = LazyTensor(
                        tuple(view.get_shape()),
                        dtype,
                        _loader(folder / name, key),
                        # Every name is its own tie, so that a name which shares it
                        # below is saved as an alias.
                        tie=key,
                    )
        except Exception as error:
            raise CheckpointError(f"{folder / name} cannot be read: {error}") from error
        # Transformers leaves a tied tensor out and mentions it in the file's metadata,
        # among other facts.
        mentioned.update(
            {
                dropped: kept
                for dropped, kept in facts.items()
                if kept in model and dropped not in model
            }
        )
    lacking = sorted(places.keys() - model.keys() - mentioned.keys())
    if lacking:
        raise CheckpointError(
            f"{index} lists {len(lacking)} tensors that are not in their files, e.g. {', '.join(lacking[:3])}: "
            "index and files are of different saves"
        )
    for dropped, kept in mentioned.items():
        if kept not in model:
            raise CheckpointError(
                f"ties: there is no tensor {kept!r}; there are e.g. {', '.join(list(model)[:3])}"
            )
        if dropped in ties and dropped in model:
            raise CheckpointError(
                f"ties: {folder} has a tensor {dropped!r} of its own, whose values would be lost; a tie is for a name "
                "that the files leave out"
            )
        if dropped != "format":
            model.setdefault(dropped, model[kept])
    return model


def _companions(folder: Path) -> dict[str, bytes | str]:
    """Read the small files of a Hugging Face folder: configuration, tokenizer, the
    model's code (which is not run)."""
    found: dict[str, bytes | str] = {}
    for file in sorted(folder.iterdir()):
        if (
            # The index of safetensors files would describe files that are not there any
            # more.
            file.suffix not in _COMPANIONS
            or file.name.endswith(".index.json")
            or not is_plain(file.name)
        ):
            continue
        try:
            found[file.name] = _regular(file, _COMPANION_BYTES).read_bytes()
        except CheckpointError as error:
            logger.warning("not imported: %s", error)
    return found


def _regular(file: Path, limit: int | None = None) -> Path:
    """Return the path of a regular file of a foreign folder, with at most ``limit``
    bytes.

    A link has to stay in the folder, or in the ``blobs`` alongside that the Hugging
    Face cache keeps its files in.

    Raises:
        CheckpointError: it is missing, a pipe, a link to elsewhere, too large.
    """
    try:
        there = file.resolve(strict=True)
        # Both are resolved, so that ".." and links in the folder's own path do not
        # matter.
        folder = file.parent.resolve()
        status = there.stat()
    except (OSError, RuntimeError) as error:
        raise CheckpointError(
            f"{file} is missing or cannot be read: {error}"
        ) from error
    if folder not in there.parents and there.parent != folder.parent.parent / "blobs":
        raise CheckpointError(
            f"{file} is a link to {there}, out of the folder: not followed; copy the file there"
        )
    if not stat.S_ISREG(status.st_mode):
        raise CheckpointError(
            f"{file} is no regular file but a folder, a pipe or a device: not read"
        )
    if limit is not None and status.st_size > limit:
        raise CheckpointError(
            f"{file} has {status.st_size} bytes, at most {limit} are read"
        )
    return there


def _loader(path: Path, key: str) -> Callable[[], Tensor]:
    def load() -> Tensor:
        with safe_open(path, framework="pt") as file:
            # torch reads the file through a mapping of memory; only this tensor is
            # copied.
            tensor: Tensor = file.get_tensor(key)
        return tensor

    return load


def _torch_load(path: Path, allow_pickle: bool) -> dict[str, Any]:
    _regular(path)
    if zipfile.is_zipfile(path):  # torch.load does not compare its checksums
        check_torch_file(path)
        if not allow_pickle:
            check_torch_content(path, str(path))
    try:
        content = torch.load(
            # Mapped into memory: tensors take none until they are written.
            path,
            map_location="cpu",
            mmap=True,
            weights_only=not allow_pickle,
        )
    except pickle.UnpicklingError as error:
        # torch's message is long; its last sentence names the class.
        first = str(error).split(". ")[-1].strip().splitlines()[0]
        raise CheckpointError(
            f"{path} holds values that only unrestricted unpickling can read ({first}); pass allow_pickle=True "
            "(--allow-pickle) if you trust its origin"
        ) from error
    except Exception as error:  # of a damaged file anything
        raise CheckpointError(
            f"{path} cannot be read: {type(error).__name__}: {error}"
        ) from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} holds a {type(content).__name__}, not a dict")
    # A state dict by itself is a model.
    if all(isinstance(value, Tensor) for value in content.values()):
        return {"state_dict": content}
    return content


def _read_lightning_folder(folder: Path, allow_pickle: bool) -> dict[str, Any]:
    sharded = read_dcp_folder(folder)
    content = _torch_load(folder / "meta.pt", allow_pickle)
    # Lightning numbers optimizers; ours are a list in that order.
    numbers = sorted(
        int(match[1])
        for key in sharded
        if (match := re.fullmatch(r"optimizer_(\d+)", key))
    )
    optimizers = [sharded.pop(f"optimizer_{number}") for number in numbers]
    return {
        **content,
        **sharded,
        **({"optimizer_states": optimizers} if optimizers else {}),
    }


def _read_accelerate(folder: Path) -> dict[str, Any]:
    parts = sorted(
        entry.name for entry in folder.iterdir() if (entry / ".metadata").is_file()
    )
    models = [name for name in parts if name.startswith("pytorch_model_fsdp_")]
    optimizers = [name for name in parts if name.startswith("optimizer_")]
    if len(models) != 1 or len(optimizers) > 1:
        raise CheckpointError(
            f"{folder} holds {len(models)} models and {len(optimizers)} optimizers; import one of each"
        )
    state = read_dcp_folder(folder / models[0])
    for name in optimizers:
        state |= read_dcp_folder(folder / name)
    # A scheduler, random states and the like are not tensors of a known layout.
    others = sorted(entry.name for entry in folder.iterdir() if entry.name not in parts)
    if others:
        logger.warning(
            "not imported (not tensors of the model or optimizer): %s",
            ", ".join(others),
        )
    return state


def export_checkpoint(
    path: StrPath,
    out: StrPath,
    kind: str,
    *,
    verify: str | None = "digests",
    overwrite: bool = False,
    allow_pickle: bool = False,
) -> None:
    """Write a checkpoint of ours as another program's folder, one tensor at a time.

    Args:
        path: checkpoint folder or address.
        out: the folder to make.
        kind: the program that is to load the folder: ``"dcp"``:
            torch.distributed.checkpoint (the state as it is); ``"lightning"``:
            Lightning's ModelParallelStrategy; ``"accelerate"``: Accelerate's FSDP2
            (model and optimizer).
        verify: check of the checkpoint before: ``"digests"``, ``"sizes"`` or None.
        overwrite: replace what is at ``out``: a file, a checkpoint or an export.
        allow_pickle: for a checkpoint saved with ``allow_pickle=True``. Runs code from
            the file.

    Raises:
        CheckpointError: broken checkpoint, unknown kind, something at ``out``, no model
            in the checkpoint.
    """
    if kind not in EXPORTS:
        raise CheckpointError(
            f"kind={kind!r} is not known; allowed: {', '.join(EXPORTS)} (safetensors: consolidate)"
        )
    target = Path(local_path(out)).absolute()
    check_free(target, overwrite, path)
    # All digests are compared before anything is written, unless `verify` says less.
    opened = open_checkpoint(path)
    check_files(opened, verify)
    opened.check_bytes = verify == "sizes"
    state: dict[str, Any] = decode_state(
        opened, lambda name: lazy_tensor(opened, name), allow_pickle
    )
    # Written beside the target, and put in its place when it is complete.
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = scratch_path(target)
    try:
        if kind == "dcp":
            write_dcp_folder(temporary, state)
        else:
            # Both programs need the model and the optimizers apart from each other.
            key = export_names(opened, "").model_key
            if key is None:
                raise CheckpointError(
                    f"{opened.address} has no {' or '.join(MODEL_KEYS)}; at its top: {', '.join(map(str, state))}"
                )
            if kind == "lightning":
                refuse_second_model(opened, key, state)
            optimizers = state.pop("optimizer_states", None) or [
                o for o in [state.pop("optimizer", None)] if o
            ]
            if kind == "lightning":
                _write_lightning(temporary, state, key, optimizers)
            else:
                _write_accelerate(temporary, state.pop(key), optimizers)
                if state:
                    logger.warning(
                        "not exported (no tensors of the model or optimizer): %s",
                        ", ".join(map(str, state)),
                    )
        put_in_place(temporary, target)
    finally:
        discard(temporary)


def _write_lightning(
    folder: Path, state: dict[str, Any], key: str, optimizers: list[Any]
) -> None:
    # Lightning has tensors in DCP's files and everything else in meta.pt.
    sharded = {
        "state_dict": state.pop(key),
        **{f"optimizer_{i}": entry for i, entry in enumerate(optimizers)},
    }
    write_dcp_folder(folder, sharded)
    torch.save(loaded(state), folder / "meta.pt")


def _write_accelerate(folder: Path, model: Any, optimizers: list[Any]) -> None:
    folder.mkdir()
    write_dcp_folder(folder / "pytorch_model_fsdp_0", {"model": model})
    for number, entry in enumerate(optimizers):
        write_dcp_folder(folder / f"optimizer_{number}", {"optimizer": entry})
