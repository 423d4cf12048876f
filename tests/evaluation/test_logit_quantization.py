# Copyright 2026 The diff_transformer authors. Licensed under the MIT License.
"""Quantized attention logits against numbers by hand and numpy, alone and in batches; the runs, and the report."""

import copy
import json
from dataclasses import asdict
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure as Canvas

from diff_transformer.evaluation.__main__ import Options
from diff_transformer.evaluation.models import load_model
from diff_transformer.evaluation.probe import Probe, attention_probe
from diff_transformer.evaluation.render import sections
from diff_transformer.evaluation.results import Results

pytest.importorskip("lm_eval", reason="HellaSwag is scored by lm-eval")

from lm_eval.models.huggingface import HFLM  # noqa: E402  (after the check)

from diff_transformer.evaluation.protocols import harness, logit_quantization  # noqa: E402  (after the check)
from diff_transformer.evaluation.protocols.logit_quantization import LogitQuantizer, quantize, unpadded_lm  # noqa: E402

LENGTHS = (5, 9, 7)


@pytest.fixture
def exact(loaded):
    """In float64: no logit lies on the border of two levels by rounding alone."""
    return copy.deepcopy(loaded.model).double()


class Recorder(LogitQuantizer):
    """Keeps what went in and what came out, by call."""

    def __init__(self, *args):
        super().__init__(*args)
        self.calls = []

    def on_logits(self, module, logits, visible):
        after = super().on_logits(module, logits, visible)
        self.calls.append((logits, after, visible))
        return after


def logits_of(model, probe, ids, **kwargs):
    with attention_probe(model, probe), torch.no_grad():
        return model(ids, use_cache=False, **kwargs).logits


# ----------------------------------------------------------------------------------------------------- quantization


def test_quantize_by_hand():
    logits = torch.tensor([[[[-3.0, 9.0], [1.4, 0.6]], [[0.4, 9.0], [-0.9, 0.3]]]])  # 9 is masked
    causal = torch.tensor([[[[True, False], [True, True]]]])
    # 3 bits: 3 levels on each side of zero, up to 3.0 in the first head, 0.9 in the second
    tensor = quantize(logits, causal, 3)[causal.expand_as(logits)]
    assert tensor.tolist() == [-3, 1, 1, 0, -1, 0], "levels 3.0 / 3 apart for the sequence"
    head = quantize(logits, causal, 3, "head")[causal.expand_as(logits)]
    torch.testing.assert_close(head, torch.tensor([-3, 1, 1, 0.3, -0.9, 0.3]), msg="a head has its own levels")


@pytest.mark.parametrize("granularity", ["tensor", "head"])
@pytest.mark.parametrize("bits", [2, 8])
def test_quantize_against_numpy(bits, granularity):
    generator = torch.Generator().manual_seed(bits)
    logits = 7 * torch.randn(3, 4, 11, 11, generator=generator, dtype=torch.float64)
    causal = torch.ones(1, 1, 11, 11).tril().bool()
    found = quantize(logits, causal, bits, granularity).numpy()
    seen = np.tril(np.ones((11, 11), bool))
    for b in range(3):
        for h in range(4):
            alike = logits[b].numpy()[:, seen] if granularity == "tensor" else logits[b, h].numpy()[seen]
            step = np.abs(alike).max() / (2 ** (bits - 1) - 1)
            expected = np.round(logits[b, h].numpy()[seen] / step) * step
            np.testing.assert_allclose(found[b, h][seen], expected, rtol=1e-12)
            assert np.abs(found[b, h][seen] - logits[b, h].numpy()[seen]).max() <= step / 2 * (1 + 1e-12)


def test_quantize_nothing_but_zeros():
    zeros = torch.zeros(1, 2, 3, 3)
    assert torch.equal(quantize(zeros, torch.ones(1, 1, 3, 3, dtype=torch.bool), 4), zeros)


# ------------------------------------------------------------------------------------------------------------ models


def test_16_bits_are_the_model_itself(loaded):
    ids = torch.randint(0, 300, (2, 33))
    with torch.no_grad():
        expected = loaded.model(ids, use_cache=False).logits
    found = logits_of(loaded.model, LogitQuantizer(16), ids)
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4, msg="the unquantized path is another model")
    assert torch.equal(found, logits_of(loaded.model, Probe(), ids))


@pytest.mark.parametrize("granularity", ["tensor", "head"])
def test_every_softmax_of_every_layer_has_few_levels(loaded, exact, granularity):
    recorder = Recorder(4, granularity)
    quantized = logits_of(exact, recorder, torch.randint(0, 300, (2, 33)))
    assert len(recorder.calls) == exact.config.num_hidden_layers
    heads = exact.config.num_attention_heads * (2 if loaded.label == "DIFF" else 1)  # V2 counts queries
    for before, after, visible in recorder.calls:
        assert after.shape[1] == heads
        seen = visible.expand(2, 1, 33, 33)[:, 0]
        for b in range(2):
            for h in range(heads):
                assert (after[b, h] != before[b, h])[seen[b]].any(), f"softmax {h} was left as it is"
                assert len(after[b, h][seen[b]].unique()) <= 15
            if granularity == "tensor":
                assert len(after[b][:, seen[b]].unique()) <= 15
    assert torch.isfinite(quantized).all()


@pytest.mark.parametrize("granularity", ["tensor", "head"])
@pytest.mark.parametrize("side", ["right", "left"])
def test_a_sequence_does_not_depend_on_its_batch_or_padding(exact, side, granularity):
    rows = [torch.randint(0, 300, (n,)) for n in LENGTHS]
    ids, mask = torch.full((3, max(LENGTHS)), 7), torch.zeros(3, max(LENGTHS), dtype=torch.long)
    places = [slice(0, n) if side == "right" else slice(max(LENGTHS) - n, None) for n in LENGTHS]
    for i, (row, place) in enumerate(zip(rows, places, strict=True)):
        ids[i, place], mask[i, place] = row, 1
    positions = (mask.cumsum(1) - 1).clamp_min(0)
    together = logits_of(exact, LogitQuantizer(4, granularity), ids, attention_mask=mask, position_ids=positions)
    for i, (row, place) in enumerate(zip(rows, places, strict=True)):
        alone = logits_of(exact, LogitQuantizer(4, granularity), row[None])[0]
        torch.testing.assert_close(together[i, place], alone, msg=f"row {i} has another range in the batch")


def test_rows_without_the_others_are_rejected(exact):
    logits = torch.randn(1, 2, 3, 8)
    visible = torch.ones(1, 1, 3, 8, dtype=torch.bool)
    assert LogitQuantizer(16).on_logits(exact, logits, visible) is logits
    with pytest.raises(ValueError, match="3 rows of 8 logits"):
        LogitQuantizer(8).on_logits(exact, logits, visible)


# ---------------------------------------------------------------------------------------------------- HellaSwag, NLL


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory):
    folder = tmp_path_factory.mktemp("rows")
    endings = [["bakes.", "eats the whole bowl.", "flies far away.", "sleeps."], ["sits.", "runs.", "is.", "goes up."]]
    rows = [
        {
            "activity_label": "Baking",
            "ctx_a": f"A man mixes {'more ' * i}dough.",
            "ctx_b": "he",
            "endings": endings[i % 2],
        }
        for i in range(6)
    ]
    text = "".join(json.dumps({**row, "label": str(i % 4)}) + "\n" for i, row in enumerate(rows))
    (folder / "hellaswag.jsonl").write_text(text)
    return str(folder)


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    file = tmp_path_factory.mktemp("text") / "rows.jsonl"
    lines = ["It was a bright cold day in April, and the clocks were striking. " * (i + 2) for i in range(4)]
    file.write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))
    return str(file)


def likelihoods(lm, data_dir):
    samples = harness.evaluate_task(lm, "hellaswag", data_dir=data_dir)
    return [value for sample in samples for value, _ in sample["filtered_resps"]]


def test_hellaswag_is_scored_without_padding(loaded, exact, data_dir, monkeypatch):
    double = SimpleNamespace(model=exact, tokenizer=loaded.tokenizer)
    plain = HFLM(pretrained=exact, tokenizer=loaded.tokenizer, backend="causal", batch_size=5)
    assert likelihoods(unpadded_lm(double, 3), data_dir) == pytest.approx(likelihoods(plain, data_dir), rel=1e-6)

    with attention_probe(exact, LogitQuantizer(4)):
        alone = likelihoods(unpadded_lm(double, 1), data_dir)
        assert likelihoods(unpadded_lm(double), data_dir) == pytest.approx(alone, rel=1e-6)
        assert likelihoods(plain, data_dir) != pytest.approx(alone, rel=1e-6), "padding does not matter to this test"


ARGUMENTS = {"task": ["hellaswag", "nll"], "bits": [16, 4], "granularity": ["tensor", "head"], "length": 40}


def run(loaded, folder, **changes):
    arguments = logit_quantization.Arguments(**{**ARGUMENTS, "documents": 4, **changes})
    results = Results.open(folder, "logit_quantization", loaded.identity, asdict(arguments), 0)
    with torch.inference_mode():
        logit_quantization.run(loaded, arguments, Options(device="cpu"), results)
    return results


@pytest.mark.slow
def test_run_and_report(twin_folders, data_dir, text, tmp_path):
    results = run(load_model(str(twin_folders["DIFF"]), device="cpu"), tmp_path, data_dir=data_dir, dataset=text)
    assert len(results.cells) == 8
    nll = {bits: results.select(task="nll", bits=bits, granularity="tensor")[0] for bits in (16, 4)}
    assert nll[16].measures["nll"].n == 4 and nll[16]["nll"] != nll[4]["nll"]
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
    assert list(lines["paper: DIFF, read off"].get_xdata()) == [16, 8, 6, 4] and axes.xaxis_inverted()
    of_heads = lines["DIFF, range of a head"]
    assert list(of_heads.get_xdata()) == [4, 16] and of_heads.get_ydata()[0] == found["acc_norm"] and len(lines) == 4


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"bits": [8, 1]}, "--bits 1"),
        ({"length": 4096}, "max_position_embeddings=2,048"),
        ({"documents": 60}, "60 were asked for"),
    ],
)
def test_run_rejects(loaded, text, tmp_path, changes, message):
    with pytest.raises(ValueError, match=message):
        run(loaded, tmp_path, **{"task": ["nll"], "dataset": text, **changes})
