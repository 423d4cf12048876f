# Copyright 2026 The diff_transformer authors. Licensed under the MIT License.
"""Every protocol, for a DIFF Transformer, its twin and a DIFF V2, by the command line; one report of all, in a
browser."""

import json
import re

import pytest
from judge_server import TRUE, judge_server
from math_rows import write_rows
from test_report import CHROMIUM, images_in_browser

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
                "--datasets",
                str(folder / "colours"),
                "--lengths",
                "100",
                "--queries",
                "16",
                "--order_seeds",
                "2",
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
def test_every_protocol_and_one_report(model_folders, arguments, tmp_path_factory, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("NO_PROXY", "*")
    out = tmp_path_factory.mktemp("out")
    assert sorted(arguments) == protocols.names(), "a protocol is not tried"
    models = [word for label, folder in model_folders.items() for word in ("--model", f"{label}={folder}")]
    for protocol, more in arguments.items():
        assert main(["evaluate", protocol, *models, "--out", str(out), "--device", "cpu", *more]) == 0, protocol
        assert {path.stem for path in (out / protocol).glob("*.json")} == set(model_folders)
    assert main(["report", str(out)]) == 0
    page = (out / "report.html").read_text()
    assert page.count("<section ") == len(arguments)
    assert page.count("what differs from the paper") >= len(arguments)
    titles = re.findall("<h2>(.+?)</h2>", page)
    order = [protocols.load(name).ORDER for name in arguments]
    assert len(set(order)) == len(order) and titles[0] == "LM Eval Harness" and titles[-1] == "Throughput"
    markdown = (out / "report.md").read_text()
    assert all(f"| {label} |" in markdown for label in model_folders)
    if CHROMIUM is not None:
        shown = images_in_browser(page, tmp_path)
        assert len(shown) == page.count("<img ") >= 5
        assert all(complete == "true" and int(width) > 500 for complete, width, *_ in shown)
