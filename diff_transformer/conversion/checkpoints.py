# Copyright 2026 The diff_transformer authors. Licensed under the MIT License.
"""Checkpoints as files: tensors read and written a few at a time."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

_TORCH_ENDINGS = (".bin", ".pt", ".pth", ".ckpt")
_NOT_WEIGHTS = ("training_args.bin", "optimizer.pt", "scheduler.pt", "scaler.pt", "rng_state.pth")  # `Trainer`'s


class Checkpoint:
    """The tensors of a folder or file, by name, without holding them: safetensors, sharded or not, or torch files.

    Torch files are mapped into memory and read as data (`weights_only=True`): no pickled code runs.
    `meta` maps every name to an empty tensor of its shape and type on the meta device.
    """

    def __init__(self, path: str | Path, state_key: str | None = None) -> None:
        self.path, self.state_key = Path(path), state_key
        self.files = _files(self.path)
        self.meta: dict[str, torch.Tensor] = {}
        self._file_of: dict[str, Path] = {}
        self._torch_states: dict[Path, dict[str, torch.Tensor]] = {}
        twice: dict[str, list[str]] = {}
        for file in self.files:
            for name, tensor in self._scan(file):
                if name in self.meta:
                    twice.setdefault(name, [self._file_of[name].name]).append(file.name)
                self.meta[name], self._file_of[name] = tensor, file
        if twice:
            lines = "\n".join(f"  {name}: {', '.join(files)}" for name, files in twice.items())
            raise ValueError(f"{self.path} holds these tensors more than once; keep one file of each:\n{lines}")

    def read(self, name: str) -> torch.Tensor:
        """A tensor; the file is opened for it alone, so that no mapping outlives it."""
        file = self._file_of[name]
        if file in self._torch_states:
            return self._torch_states[file][name]
        with safe_open(file, "pt") as opened:
            return opened.get_tensor(name)

    def _scan(self, file: Path) -> Iterator[tuple[str, torch.Tensor]]:
        if file.suffix in _TORCH_ENDINGS:
            state = self._torch_states[file] = _torch_state(file, self.state_key)
            yield from ((name, torch.empty_like(tensor, device="meta")) for name, tensor in state.items())
            return
        try:
            with safe_open(file, "pt") as opened:
                for name in opened.keys():  # noqa: SIM118 (not a dict)
                    part = opened.get_slice(name)
                    dtype = _DTYPES.get(part.get_dtype())
                    dtype = opened.get_tensor(name).dtype if dtype is None else dtype
                    yield name, torch.empty(part.get_shape(), dtype=dtype, device="meta")
        except SafetensorError as error:
            raise ValueError(
                f"{file} is no whole safetensors file ({error}). It is damaged or was cut off: copy or download it "
                "again."
            ) from error


_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def _files(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise FileNotFoundError(f"{path} does not exist; give the folder or the file of a checkpoint.")
    indices = [*sorted(path.glob("*.safetensors.index.json")), *sorted(path.glob("*.bin.index.json"))]
    index = next(iter(indices), None)
    if index is not None:
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        files = [path / name for name in names]
        missing = [file.name for file in files if not file.is_file()]
        if missing:
            raise FileNotFoundError(
                f"{index} names {', '.join(missing)}, which {'is' if len(missing) == 1 else 'are'} not there: copy or "
                "download the rest of the checkpoint."
            )
        return files
    for endings in ((".safetensors",), _TORCH_ENDINGS):
        files = sorted(file for file in path.iterdir() if file.suffix in endings and file.name not in _NOT_WEIGHTS)
        if files:
            return files
    raise FileNotFoundError(f"{path} holds no checkpoint: no *.safetensors, no {', no *'.join(_TORCH_ENDINGS)} file.")


def _torch_state(file: Path, state_key: str | None) -> dict[str, torch.Tensor]:
    try:
        state = torch.load(file, map_location="cpu", mmap=True, weights_only=True)
    except Exception as error:  # torch raises many kinds, and each is the user's answer
        raise ValueError(
            f"{file} cannot be read as tensors alone ({str(error).splitlines()[0]}). Pickled code is not run: save "
            "its state dict with torch.save(model.state_dict(), ...) or as safetensors."
        ) from error
    if state_key is not None:
        if not isinstance(state, dict) or state_key not in state:
            raise ValueError(f"{file} has no {state_key!r}; at its top are {_some(state)}.")
        state = state[state_key]
    others = [] if not isinstance(state, dict) else [k for k, v in state.items() if not isinstance(v, torch.Tensor)]
    if not isinstance(state, dict) or others:
        raise ValueError(
            f"{file} is not a table of tensors: {_some(others or state)} are something else. If the weights lie "
            "deeper, name the key that holds them with --state-key."
        )
    return state


def _some(keys) -> str:
    keys = list(keys) if isinstance(keys, dict | list) else [type(keys).__name__]
    return ", ".join(map(repr, keys[:10])) + (", ..." if len(keys) > 10 else "")


def write_shards(
    folder: Path,
    meta: dict[str, torch.Tensor],
    make: Callable[[str], torch.Tensor],
    max_shard_size: int | str,
    progress: Callable[[int], None] = lambda size: None,
) -> None:
    """Sharded safetensors with an index, one shard in memory at a time. meta: what will be written, on meta."""
    split = split_torch_state_dict_into_shards(meta, max_shard_size=max_shard_size)
    for file, names in split.filename_to_tensors.items():
        tensors = {}
        for name in names:
            tensors[name] = make(name).contiguous()
            progress(tensors[name].nbytes)
        save_file(tensors, folder / file, metadata={"format": "pt"})
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")


__all__ = ["Checkpoint", "write_shards"]
