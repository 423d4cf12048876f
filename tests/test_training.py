# Copyright 2026 The diff_transformer authors. Licensed under the MIT License.
"""Training with transformers' `Trainer`, and documents packed in a row."""

import pytest
import torch
from tolerances import assert_all_close
from torch._dynamo.utils import counters
from transformers import (
    AutoModelForCausalLM,
    DataCollatorWithFlattening,
    PreTrainedModel,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    default_data_collator,
)

import diff_transformer  # noqa: F401  (registers the models)

VOCAB_SIZE = 320
LENGTH = 32
IMPLEMENTATIONS = ["flash_diff", "sdpa", "eager"]


@pytest.fixture(scope="module")
def rows() -> list[dict]:
    ids = [i * i % 97 for i in range(8 * LENGTH)]
    return [{"input_ids": ids[i : i + LENGTH], "labels": ids[i : i + LENGTH]} for i in range(0, 8 * LENGTH, LENGTH)]


@pytest.fixture
def make_model(tiny_config):
    def make(seed: int = 0, attn_implementation: str = "flash_diff", **kwargs) -> PreTrainedModel:
        torch.manual_seed(seed)
        config = tiny_config(**{"vocab_size": VOCAB_SIZE, "hidden_size": 32, "intermediate_size": 48, **kwargs})
        return AutoModelForCausalLM.from_config(config, attn_implementation=attn_implementation)

    return make


class GradientRecorder(TrainerCallback):
    """Keeps the gradients of every optimizer step."""

    def __init__(self):
        self.steps: list[dict[str, torch.Tensor]] = []

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        self.steps.append(gradients(model))


def gradients(model) -> dict[str, torch.Tensor]:
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


def losses(trainer: Trainer) -> list[float]:
    return [float(entry["loss"]) for entry in trainer.state.log_history if "loss" in entry]


@pytest.fixture
def make_trainer(tmp_path, rows):
    def make(model, callbacks, data_collator=default_data_collator, **kwargs) -> Trainer:
        defaults = {"output_dir": str(tmp_path / "output"), "max_steps": 2, "per_device_train_batch_size": 4}
        defaults |= {"learning_rate": 1e-3, "lr_scheduler_type": "constant", "logging_steps": 1, "report_to": []}
        defaults |= {"save_strategy": "no", "use_cpu": True, "disable_tqdm": True}
        return Trainer(model, TrainingArguments(**{**defaults, **kwargs}), data_collator, rows, callbacks=callbacks)

    return make


@pytest.mark.parametrize("attn_implementation", IMPLEMENTATIONS)
def test_bf16_autocast_trains_like_float32(attn_implementation, make_model, make_trainer):
    results = {}
    for bf16 in (False, True):
        recorder = GradientRecorder()
        model = make_model(attn_implementation=attn_implementation)
        trainer = make_trainer(model, bf16=bf16, callbacks=[recorder], max_grad_norm=0.0)
        trainer.train()
        assert all(p.dtype == torch.float32 for p in model.parameters()), "autocast changed the weights' type"
        results[bf16] = losses(trainer), recorder.steps[0]

    (expected_losses, expected), (actual_losses, actual) = results[False], results[True]
    assert actual_losses != expected_losses, "bf16=True computed in float32: the test shows nothing"
    assert actual_losses == pytest.approx(expected_losses, rel=2e-3)
    # The floor is for the lambda vectors: their gradient is one sum over all tokens and heads, in which most cancels
    floor = 0.01 * torch.stack([gradient.norm() for gradient in expected.values()]).norm()
    for name, gradient in expected.items():
        error = (actual[name] - gradient).norm() / torch.maximum(gradient.norm(), floor)
        assert error < 0.1, f"the gradient of {name} is off by {error:.3f} in relative norm under autocast"


@pytest.mark.compile
@pytest.mark.parametrize("packed_by", ["position_ids", "cu_seq_lens"])
def test_torch_compile_gives_the_eager_losses_of_packed_rows(packed_by, make_model, make_trainer, monkeypatch):
    # TrainingArguments sets it for good; the end of the test takes it back
    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "no")
    torch.compiler.reset()
    counters.clear()
    collator = DataCollatorWithFlattening(return_flash_attn_kwargs=packed_by == "cu_seq_lens")
    results = []
    for compiled in (False, True):
        recorder = GradientRecorder()
        model = make_model(num_hidden_layers=1)  # compiling takes a time by the layer
        # Only traced: generating the code takes most of the time
        kwargs = {"torch_compile": True, "torch_compile_backend": "aot_eager"} if compiled else {}
        trainer = make_trainer(model, [recorder], collator, max_grad_norm=0.0, **kwargs)
        trainer.train()
        results.append((losses(trainer), recorder.steps))
    torch.compiler.reset()

    assert counters["stats"]["unique_graphs"] == 1 and not counters["graph_break"], f"not one graph: {counters}"
    (expected_losses, expected_steps), (actual_losses, actual_steps) = results
    assert actual_losses == pytest.approx(expected_losses, rel=1e-4)
    actual = {name.removeprefix("_orig_mod."): gradient for name, gradient in actual_steps[0].items()}
    assert_all_close(actual, expected_steps[0], "gradient under torch.compile", atol=1e-4)


# Two rows of 48 tokens; the one-token document has no label of its own
ROWS = ((20, 1, 17, 10), (31, 17))
DOCUMENTS = [length for row in ROWS for length in row]


@pytest.fixture
def documents() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(0, VOCAB_SIZE, (length,), generator=generator) for length in DOCUMENTS]


def pack(documents: list[torch.Tensor], announced_by: str, two_rows: bool) -> dict:
    """What `DataCollatorWithFlattening` makes of the documents, in one row or folded into the two of ROWS."""
    batch = DataCollatorWithFlattening(
        return_position_ids=announced_by != "cu_seq_lens",
        return_flash_attn_kwargs=announced_by != "position_ids",
        return_seq_idx=announced_by == "both",
    )([{"input_ids": ids} for ids in documents])
    if two_rows:
        batch = {k: v.view(len(ROWS), -1) if getattr(v, "ndim", 0) == 2 else v for k, v in batch.items()}
    return batch


@pytest.mark.oldest
@pytest.mark.parametrize(("mode", "two_rows"), [("train", True), ("train", False), ("eval", True)])
@pytest.mark.parametrize("announced_by", ["position_ids", "cu_seq_lens", "both"])
@pytest.mark.parametrize("attn_implementation", IMPLEMENTATIONS)
def test_packed_documents_equal_separate_ones(
    attn_implementation, announced_by, two_rows, mode, make_model, documents
):
    model = make_model(attn_implementation=attn_implementation).train(mode == "train")
    assert model.config.use_cache, "the default of an eval forward is what is tested"
    num_labels = sum(length - 1 for length in DOCUMENTS)
    logits, expected_loss = [], 0.0
    for ids in documents:
        output = model(ids[None], labels=ids[None], num_items_in_batch=num_labels)
        logits.append(output.logits[0].detach())
        if len(ids) > 1:
            expected_loss += output.loss.item()
            output.loss.backward()
    expected = gradients(model)
    model.zero_grad()

    output = model(**pack(documents, announced_by, two_rows))
    output.loss.backward()
    torch.testing.assert_close(
        output.logits.flatten(0, 1), torch.cat(logits), rtol=1e-4, atol=1e-4, msg=lambda m: f"packed logits: {m}"
    )
    assert output.loss.item() == pytest.approx(expected_loss, rel=1e-5), "packing changed the loss"
    assert_all_close(gradients(model), expected, "gradient of packed documents")


@pytest.mark.oldest
@pytest.mark.parametrize(
    ("tiny_config", "attn_implementation", "use_reentrant"),
    [
        ("v1", "flash_diff", False),
        ("v1", "flash_diff", True),
        ("v1", "sdpa", False),
        ("v1", "eager", True),
        ("v1 shared", "flash_diff", False),
        ("v2", "sdpa", False),
    ],
    indirect=["tiny_config"],
)
def test_activation_checkpointing_changes_no_bit(attn_implementation, use_reentrant, make_model, documents):
    """With packed rows, whose documents must reach the second forward too."""
    model, calls, results = make_model(attn_implementation=attn_implementation).train(), [], []
    model.model.layers[0].self_attn.register_forward_hook(lambda *args: calls.append(1))
    for num_calls in (1, 3):
        model.zero_grad()
        loss = model(**pack(documents, "both", two_rows=True)).loss
        loss.backward()
        results.append({**gradients(model), "loss": loss})
        assert len(calls) == num_calls, "nothing was checkpointed"
        # Named `gradient_checkpointing_enable` before transformers 5.23
        enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
        enable({"use_reentrant": use_reentrant})
    for name, expected in results[0].items():
        assert torch.equal(results[1][name], expected), f"checkpointing changed {name} or its gradient"
