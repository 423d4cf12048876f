# Copyright 2026 The diff_transformer authors. Licensed under the MIT License.
"""The files of a checkpoint: tensors read and written a few at a time."""

import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors import safe_open
from tqdm import tqdm

from ..safetensors_headers import read_header, read_weight_map

_TORCH_ENDINGS = (".bin", ".pt", ".pth", ".ckpt")
_NOT_WEIGHTS = ("training_args.bin", "optimizer.pt", "scheduler.pt", "scaler.pt", "rng_state.pth")  # `Trainer`'s
DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


class CheckpointFiles:
    """The tensors of a folder or file by name, not held in memory: safetensors, sharded or not, or torch files.

    Torch files are memory-mapped and read as data (`weights_only=True`): no pickled code runs.
    `meta` maps every name to an empty tensor of its shape and type on the meta device.
    """

    def __init__(self, path: str | Path, state_key: str | None = None) -> None:
        self.path = Path(path)
        self.folder = self.path if self.path.is_dir() else self.path.parent
        self.meta: dict[str, torch.Tensor] = {}
        self._file_of: dict[str, Path] = {}
        self._torch_states: dict[Path, dict[str, torch.Tensor]] = {}
        repeated: dict[str, list[str]] = {}
        for file in _find_files(self.path):
            for name, tensor in self._scan(file, state_key):
                if name in self.meta:
                    repeated.setdefault(name, [self._file_of[name].name]).append(file.name)
                self.meta[name], self._file_of[name] = tensor, file
        if repeated:
            lines = "\n".join(f"  {name}: {', '.join(files)}" for name, files in repeated.items())
            raise ValueError(f"{self.path} holds these tensors more than once; keep one file of each:\n{lines}")

    def read(self, name: str) -> torch.Tensor:
        """One tensor; its file is opened for it alone, so that no memory mapping outlives it."""
        file = self._file_of[name]
        if file in self._torch_states:
            return self._torch_states[file][name]
        with safe_open(file, "pt") as opened:
            return opened.get_tensor(name)

    def read_blocks(self, name: str, rows: int = 8192) -> Iterator[torch.Tensor]:
        """One tensor, some of its rows at a time."""
        file = self._file_of[name]
        for start in range(0, len(self.meta[name]), rows):
            if file in self._torch_states:
                yield self._torch_states[file][name][start : start + rows]
            else:
                with safe_open(file, "pt") as opened:
                    yield opened.get_slice(name)[start : start + rows]

    def _scan(self, file: Path, state_key: str | None) -> Iterator[tuple[str, torch.Tensor]]:
        if file.suffix in _TORCH_ENDINGS:
            state = self._torch_states[file] = _torch_state(file, state_key)
            yield from ((name, torch.empty_like(tensor, device="meta")) for name, tensor in state.items())
            return
        for name, header in read_header(file).items():
            self._file_of.setdefault(name, file)
            dtype = DTYPES.get(header.dtype) or self.read(name).dtype
            yield name, torch.empty(header.shape, dtype=dtype, device="meta")


def _find_files(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise FileNotFoundError(f"{path} does not exist; pass the folder or the file of a checkpoint.")
    for index in (*sorted(path.glob("*.safetensors.index.json")), *sorted(path.glob("*.bin.index.json"))):
        files = [path / name for name in sorted(set(read_weight_map(index).values()))]
        missing = [file.name for file in files if not file.is_file()]
        if missing:
            absent = f"{index} names files that do not exist: {', '.join(missing)}"
            raise FileNotFoundError(f"{absent}. Copy or download the rest of the checkpoint.")
        return files
    for endings in ((".safetensors",), _TORCH_ENDINGS):
        files = sorted(file for file in path.iterdir() if file.suffix in endings and file.name not in _NOT_WEIGHTS)
        if files:
            return files
    raise FileNotFoundError(f"{path} holds no checkpoint: no *.safetensors, no {', no *'.join(_TORCH_ENDINGS)} file.")


def _torch_state(file: Path, state_key: str | None) -> dict[str, torch.Tensor]:
    try:
        state = torch.load(file, map_location="cpu", mmap=True, weights_only=True)
    except Exception as error:  # torch raises many kinds, and the user needs to see each of them
        raise ValueError(
            f"{file} cannot be read as tensors alone ({str(error).splitlines()[0]}). Pickled code is not run: save "
            "its state dict with torch.save(model.state_dict(), ...) or as safetensors."
        ) from error
    keys = list(state) if isinstance(state, dict) else []
    if state_key is not None:
        if state_key not in keys:
            raise ValueError(f"{file} has no {state_key!r}; its top-level keys are {_first_ten(keys)}.")
        state = state[state_key]
    if not isinstance(state, dict):
        raise ValueError(f"{file} holds a {type(state).__name__}, not a dict of tensors. Save a state dict.")
    others = [name for name, value in state.items() if not isinstance(value, torch.Tensor)]
    if others:
        raise ValueError(
            f"{file} is not a dict of tensors: {_first_ten(others)} are something else. If the weights are nested, "
            "name the key that holds them with --state-key."
        )
    return state


def _first_ten(keys: list) -> str:
    return ", ".join(map(repr, keys[:10])) + (", ..." if len(keys) > 10 else "")


def write_shards(
    folder: Path,
    meta: dict[str, torch.Tensor],
    blocks: Callable[[str], Iterable[torch.Tensor]],
    max_shard_size: int | str,
) -> None:
    """Writes safetensors (https://github.com/huggingface/safetensors#format), with an index for several files;
    one block of a tensor is in memory at a time.

    meta: the tensors to write, on meta, of one of `DTYPES`. blocks: from a name to the rows of its tensor, in one or
    several blocks.
    """
    split = split_torch_state_dict_into_shards(meta, max_shard_size=max_shard_size)
    with tqdm(total=sum(x.nbytes for x in meta.values()), unit="B", unit_scale=True, desc="Converting") as bar:
        for file, names in split.filename_to_tensors.items():
            names = sorted(names, key=lambda name: -meta[name].itemsize)  # every tensor is then aligned to its type
            with (folder / file).open("wb") as opened:
                opened.write(_header({name: meta[name] for name in names}))
                for block in (block for name in names for block in blocks(name)):
                    opened.write(block.contiguous().flatten().view(torch.uint8).numpy())
                    bar.update(block.nbytes)
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")


def _header(meta: dict[str, torch.Tensor]) -> bytes:
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, x in meta.items():
        code = next(code for code, dtype in DTYPES.items() if dtype == x.dtype)
        entries[name] = {"dtype": code, "shape": list(x.shape), "data_offsets": [end, end := end + x.nbytes]}
    header = json.dumps(entries).encode()
    header += b" " * (-len(header) % 8)
    return len(header).to_bytes(8, "little") + header
