# Copyright 2026 The diff_transformer authors. Licensed under the MIT License.
"""Quantized attention logits against numpy, alone and in batches; the runs, and the report."""

import copy
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure as Canvas
from rows import write_jsonl

from diff_transformer.evaluation.generate import token_nll
from diff_transformer.evaluation.render import sections
from diff_transformer.evaluation.text import load_documents, token_rows

pytest.importorskip("lm_eval", reason="HellaSwag is scored by lm-eval")

from lm_eval.models.huggingface import HFLM  # noqa: E402  (after the check)

from diff_transformer.evaluation.protocols import harness, logit_quantization  # noqa: E402  (after the check)
from diff_transformer.evaluation.protocols.logit_quantization import quantize, quantized, unpadded_lm  # noqa: E402

LENGTHS = (5, 9, 7)


@pytest.fixture
def exact(loaded):
    """In float64: no logit lies on the border of two levels by rounding alone."""
    return copy.deepcopy(loaded.model).double()


@torch.no_grad()
def logits_of(model, ids, *options, **kwargs):
    with quantized(model, *options):
        return model(ids, use_cache=False, **kwargs).logits


@pytest.mark.parametrize("granularity", ["tensor", "head"])
@pytest.mark.parametrize("bits", [2, 8])
def test_quantize_is_numpys(bits, granularity):
    generator = torch.Generator().manual_seed(bits)
    logits = 7 * torch.randn(3, 4, 11, 11, generator=generator, dtype=torch.float64)
    seen = np.tril(np.ones((11, 11), bool))
    causal = torch.from_numpy(seen)[None, None]
    logits.masked_fill_(~causal, 100)
    found = quantize(logits, causal, bits, granularity).numpy()[..., seen]
    values = logits.numpy()[..., seen]  # (3, 4, visible)
    largest = np.abs(values).max((1, 2) if granularity == "tensor" else 2, keepdims=True)
    step = largest / (2 ** (bits - 1) - 1)
    np.testing.assert_allclose(found, np.round(values / step) * step, rtol=1e-12)
    assert torch.equal(quantize(0 * logits, causal, bits, granularity), 0 * logits)


@pytest.mark.parametrize("granularity", ["tensor", "head"])
def test_quantized_logits_have_few_levels_in_every_layer(loaded, exact, granularity, monkeypatch):
    calls = []

    def recorded(logits, counted, *options):
        calls.append((logits, quantize(logits, counted, *options), counted))
        return calls[-1][1]

    monkeypatch.setattr(logit_quantization, "quantize", recorded)
    assert logits_of(exact, torch.randint(0, 300, (2, 33)), 4, granularity).isfinite().all()
    assert len(calls) == exact.config.num_hidden_layers
    heads = exact.config.num_attention_heads * (2 if loaded.label == "DIFF" else 1)  # V2 counts queries
    for before, after, visible in calls:
        assert after.shape[1] == heads
        for b in range(2):
            seen = visible.expand(2, 1, 33, 33)[b, 0]
            for h in range(heads):
                assert (after[b, h] != before[b, h])[seen].any(), f"softmax {h} was left as it is"
            levels = [after[b]] if granularity == "tensor" else after[b]
            assert all(len(x[..., seen].unique()) <= 15 for x in levels)


@pytest.mark.parametrize("granularity", ["tensor", "head"])
@pytest.mark.parametrize("side", ["right", "left"])
def test_quantized_logits_do_not_depend_on_batch_or_padding(exact, side, granularity):
    rows = [torch.randint(0, 300, (n,)) for n in LENGTHS]
    ids, mask = torch.full((3, max(LENGTHS)), 7), torch.zeros(3, max(LENGTHS), dtype=torch.long)
    places = [slice(0, n) if side == "right" else slice(max(LENGTHS) - n, None) for n in LENGTHS]
    for i, (row, place) in enumerate(zip(rows, places, strict=True)):
        ids[i, place], mask[i, place] = row, 1
    positions = (mask.cumsum(1) - 1).clamp_min(0)
    together = logits_of(exact, ids, 4, granularity, attention_mask=mask, position_ids=positions)
    for i, (row, place) in enumerate(zip(rows, places, strict=True)):
        alone = logits_of(exact, row[None], 4, granularity)[0]
        torch.testing.assert_close(together[i, place], alone, msg=f"row {i} has another range in the batch")


def test_quantized_rejects_rows_without_the_others(exact):
    with quantized(exact, 8), pytest.raises(ValueError, match="7 rows of 14 logits"):
        token_nll(exact, torch.zeros(1, 20, dtype=torch.long), chunk_size=7)


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory):
    folder = tmp_path_factory.mktemp("rows")
    endings = [["bakes.", "eats the whole bowl.", "flies far away.", "sleeps."], ["sits.", "runs.", "is.", "goes up."]]
    rows = [{"ctx_a": f"A man mixes {'more ' * i}dough.", "endings": endings[i % 2]} for i in range(6)]
    same = {"activity_label": "Baking", "ctx_b": "he"}
    write_jsonl(folder / "hellaswag.jsonl", [{**same, **row, "label": str(i % 4)} for i, row in enumerate(rows)])
    return str(folder)


def likelihoods(lm, data_dir):
    samples = harness.evaluate_task(lm, harness.load_task("hellaswag", 0, data_dir))
    return [value for sample in samples for value, _ in sample["filtered_resps"]]


def test_hellaswag_is_scored_without_padding(loaded, exact, data_dir, monkeypatch):
    double = SimpleNamespace(model=exact, tokenizer=loaded.tokenizer)
    plain = HFLM(pretrained=exact, tokenizer=loaded.tokenizer, backend="causal", batch_size=5)
    assert likelihoods(unpadded_lm(double, 3), data_dir) == pytest.approx(likelihoods(plain, data_dir), rel=1e-6)

    with quantized(exact, 4):
        alone = likelihoods(unpadded_lm(double, 1), data_dir)
        assert likelihoods(unpadded_lm(double), data_dir) == pytest.approx(alone, rel=1e-6)
        assert likelihoods(plain, data_dir) != pytest.approx(alone, rel=1e-6), "padding does not matter to this test"


@pytest.mark.slow
def test_run_and_report(diff, run, data_dir, tmp_path, monkeypatch):
    evaluated = []
    monkeypatch.setattr(
        logit_quantization, "evaluate_task", lambda *args: evaluated.append(args) or harness.evaluate_task(*args)
    )
    rows = [{"text": "It was a bright cold day in April. The clocks were striking. " * (i + 2)} for i in range(4)]
    dataset = write_jsonl(tmp_path / "rows.jsonl", rows)
    both = {"task": ["hellaswag", "nll"], "bits": [16, 4], "granularity": ["tensor", "head"], "data_dir": data_dir}
    arguments = logit_quantization.Arguments(dataset=dataset, length=40, documents=4, **both)
    results = run(logit_quantization, diff, arguments)
    assert len(results.cells) == 8 and len(evaluated) == 3, "16 bits are measured again for the other granularity"
    nll = {bits: results.select(task="nll", bits=bits, granularity="tensor")[0] for bits in (16, 4)}
    assert nll[16].measures["nll"].n == 4 and nll[16]["nll"] != nll[4]["nll"]
    rows = torch.tensor(token_rows(load_documents(arguments), diff.tokenizer, 40, 4, join=True))
    assert nll[16]["nll"] == pytest.approx(diff.model(rows, labels=rows).loss.item(), rel=1e-5)
    plain = results.select(task="hellaswag", bits=16, granularity="head")[0]
    assert plain.measures == results.select(task="hellaswag", bits=16, granularity="tensor")[0].measures
    assert plain.measures["acc_norm"].n == 6

    (section,) = sections({"logit_quantization": [results]})
    hellaswag, nll_table = (comparison.table() for comparison in section.comparisons)
    rows = {(row[0], row[1]): row for row in hellaswag.rows}
    assert rows[16, "tensor"][2:4] == [63.4, 66.2] and rows[4, "head"][2:4] == [33.9, 58.8]
    found = results.select(task="hellaswag", bits=4, granularity="head")[0]
    assert rows[4, "head"][4].value == pytest.approx(100 * found["acc_norm"])
    how = f"models of 0.1 million parameters; data dir {data_dir}; not stated in the paper: granularity head"
    assert rows[4, "head"][-1] == how
    assert nll_table.rows[0][2:4] == [None, None] and "task nll (paper: hellaswag)" in nll_table.rows[0][-1]

    canvas = Canvas(layout="constrained")
    section.figures[0].draw(canvas)
    (axes,) = canvas.axes
    lines = {line.get_label(): line for line in axes.get_lines()}
    of_heads = lines["DIFF, one range per head"]
    assert axes.xaxis_inverted() and len(lines) == 2
    assert list(of_heads.get_xdata()) == [4, 16] and of_heads.get_ydata()[0] == found["acc_norm"]
