# Copyright 2026 The diff_transformer authors. Licensed under the MIT License.
"""Encoding speed of cl100k_base: tiktoken, the tokenizers library, and the transformers tokenizer built on it.

    python -m benchmarks.tokenizer_speed --out benchmarks/results/tokenizer_cpu_<date>

All methods encode the same documents, the sources of Python's standard library. No figures are written unless all
return the same ids. Seconds are wall-clock time. CPU seconds, summed over threads, vary less when other programs share
the cores (`load`: the load average at the start).
"""

import os
import platform
import time
from importlib.metadata import version
from unittest import mock

import tiktoken
import tiktoken.load
import tiktoken_ext.openai_public

from benchmarks.report import argument_parser, command, show, write
from benchmarks.texts import STANDARD_LIBRARY, python_sources
from diff_transformer.tokenization_cl100k import RANKS_FILE, cl100k_tokenizer


def documents(num_bytes: int) -> tuple[list[str], int]:
    """The standard library's sources until they reach `num_bytes`, and their size."""
    texts: list[str] = []
    size = 0
    for text in python_sources(STANDARD_LIBRARY):
        texts.append(text)
        size += len(text.encode())
        if size >= num_bytes:
            return texts, size
    raise ValueError(f"{STANDARD_LIBRARY} has {size} bytes of sources, --megabytes asks for {num_bytes}: pass less")


def tiktoken_cl100k() -> tiktoken.Encoding:
    """tiktoken's own cl100k_base, which reads the shipped ranks instead of downloading them."""

    def load_shipped(url: str, expected_hash: str) -> dict[bytes, int]:
        return tiktoken.load.load_tiktoken_bpe(str(RANKS_FILE), expected_hash)

    with (
        mock.patch.dict(os.environ, {"TIKTOKEN_CACHE_DIR": ""}),  # no copy in the temporary folder
        mock.patch.object(tiktoken_ext.openai_public, "load_tiktoken_bpe", load_shipped),
    ):
        return tiktoken.Encoding(**tiktoken_ext.openai_public.cl100k_base())


def main(arguments: list[str] | None = None) -> None:
    parser = argument_parser(__doc__)
    add = parser.add_argument
    add("--megabytes", type=float, default=10, help="size of the text in 10^6 bytes (default: %(default)s)")
    add("--repeats", type=int, default=3, help="runs per method, of which the fastest counts (default: %(default)s)")
    add("--hardware", default="AMD EPYC (2 cores)", help="name of the machine (default: %(default)s)")
    options = parser.parse_args(arguments)

    texts, num_bytes = documents(int(options.megabytes * 1e6))
    encoding, tokenizer = tiktoken_cl100k(), cl100k_tokenizer()
    backend = tokenizer.backend_tokenizer
    backend.encode_special_tokens = True  # all methods treat special tokens as text
    cores = len(os.sched_getaffinity(0))
    methods = {
        "tiktoken encode_ordinary": (1, lambda: [encoding.encode_ordinary(text) for text in texts]),
        "tiktoken encode_ordinary_batch": (cores, lambda: encoding.encode_ordinary_batch(texts, num_threads=cores)),
        "tokenizers encode_batch_fast": (cores, lambda: [encoded.ids for encoded in backend.encode_batch_fast(texts)]),
        "transformers __call__": (cores, lambda: tokenizer(texts, split_special_tokens=True)["input_ids"]),
    }
    rows = []
    reference = methods["tiktoken encode_ordinary"][1]()
    num_tokens = sum(map(len, reference))
    for name, (threads, encode) in methods.items():
        load = os.getloadavg()[0]
        if encode() != reference:
            raise AssertionError(f"{name} and tiktoken gave different ids: the tokenizer's tests must fail too")
        times = []
        for _ in range(options.repeats):
            start, cpu_start = time.perf_counter(), time.process_time()
            encode()
            times.append((time.perf_counter() - start, time.process_time() - cpu_start))
        row = {"method": name, "threads": threads, "documents": len(texts), "bytes": num_bytes, "tokens": num_tokens}
        for column, measured in zip(("second", "cpu_second"), map(min, zip(*times, strict=True)), strict=True):
            row |= {f"{column}s": round(measured, 3), f"tokens_per_{column}": round(num_tokens / measured)}
        row |= {"load": round(load, 1), "hardware": options.hardware, "python": platform.python_version()}
        row |= {package: version(package) for package in ("tiktoken", "tokenizers", "transformers")}
        rows.append(show({**row, "command": command("tokenizer_speed", arguments)}))
    write(options.out, rows)


if __name__ == "__main__":
    main()
