# Copyright 2026 The diff_transformer authors. Licensed under the MIT License.
"""Every protocol by the command line, and one report of all."""

import base64
import json
import re

import pytest
from judge_server import TRUE, judge_server
from math_rows import write_rows

from diff_transformer.evaluation import protocols
from diff_transformer.evaluation.__main__ import main

TEXT = ["--text_column", "body", "--dataset"]


def write(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.fixture(scope="module")
def arguments(tmp_path_factory):
    """What each protocol needs beside the models, on data of the same columns as the originals'."""
    folder = tmp_path_factory.mktemp("data")
    books = write(folder / "books.jsonl", [{"body": f"{i} " + "The boats went out at dawn. " * 90} for i in range(3)])
    for split in ("train", "test"):
        rows = [{"text": f"{colour} {i}", "label": colour} for colour in ("red", "blue") for i in range(8)]
        write(folder / "colours" / f"{split}.jsonl", rows)
    articles = [{"document": f"{i} ships left.", "summary": f"{i} ships."} for i in range(2)]
    xsum = write(folder / "xsum.jsonl", articles)
    write(folder / "piqa.jsonl", [{"goal": "Open it.", "sol1": "Turn.", "sol2": "Sing aloud.", "label": 0}])
    with judge_server(lambda prompt, times: TRUE) as server:
        yield {
            "harness": ["--tasks", "piqa", "--shots", "0", "--data_dir", str(folder)],
            "nll_by_position": [*TEXT, books, "--length", "300", "--documents", "2"],
            "needle": [*TEXT, books, "--lengths", "700", "--pairs", "1:1", "4:2", "--samples", "1"],
            "attention_allocation": [*TEXT, books, "--length", "500", "--samples", "1"],
            "many_shot": [
                *("--datasets", str(folder / "colours"), "--lengths", "100"),
                *("--queries", "16", "--order_seeds", "2"),
            ],
            "hallucination": [
                *("--datasets", f"xsum={xsum}", "--samples", "2"),
                *("--judge_base_url", server.url, "--judge_model", "gpt-4o"),
            ],
            "outliers": [*TEXT, books, "--length", "256", "--tokens", "512"],
            "logit_quantization": [*TEXT, books, "--length", "256", "--documents", "1", "--task", "nll"],
            "fine_grained_loss": [*TEXT, books, "--length", "256", "--documents", "2"],
            "recall": ["--pairs", "2", "4", "--length", "40", "--rows", "4"],
            "throughput": ["--lengths", "16", "--rounds", "1"],
            "math": ["--data_dir", write_rows(folder / "math"), "--max_new_tokens", "4"],
        }


@pytest.mark.slow
@pytest.mark.process
def test_every_protocol_and_one_report(twin_folders, arguments, tmp_path, monkeypatch):
    monkeypatch.setenv("NO_PROXY", "*")
    assert sorted(arguments) == protocols.names(), "a protocol is not tried"
    model = ["--model", f"DIFF={twin_folders['DIFF']}"]
    for protocol, more in arguments.items():
        assert main(["evaluate", protocol, *model, "--out", str(tmp_path), "--device", "cpu", *more]) == 0, protocol
        assert {path.stem for path in (tmp_path / protocol).glob("*.json")} == {"DIFF"}
    assert main(["report", str(tmp_path)]) == 0
    page = (tmp_path / "report.html").read_text()
    assert page.count("what differs from the paper") >= len(arguments)
    titles = re.findall("<h2>(.+?)</h2>", page)
    assert len(titles) == len(arguments)
    order = [protocols.load(name).ORDER for name in arguments]
    assert len(set(order)) == len(order) and titles[0] == "LM Eval Harness" and titles[-1] == "Throughput"
    images = re.findall(r'<img [^>]*src="data:image/png;base64,([^"]+)"', page)
    assert len(images) == page.count("<img ") >= 5
    assert all(base64.b64decode(image).startswith(b"\x89PNG") for image in images)
