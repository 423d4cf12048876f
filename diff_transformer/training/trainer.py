# Copyright 2026 The diff_transformer authors. Licensed under the MIT License.
"""What every stage adds to transformers' `Trainer`.

Weight decay excludes lambda and the norms; the log has lambda, tokens per second and MFU; checkpoints that are not
whole are ignored; a loss that is not finite stops the run before it reaches the weights.
"""

import math
import re
import shutil
import time
from contextlib import AbstractContextManager, ExitStack, nullcontext
from pathlib import Path

import torch
from accelerate.utils import broadcast_object_list
from safetensors.torch import save_file
from torch.distributed.tensor import DTensor
from transformers import Trainer
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, rotate_checkpoints
from transformers.utils import logging

from ..folders import whole_folder
from ..modeling_diff import DiffTransformerAttention
from .batch_record import BatchRecord
from .budget import model_flops_per_token, peak_flops
from .whole_checkpoints import seal

logger = logging.get_logger(__name__)

# transformers excludes biases, and norms that it recognises by name. Decay would pull the lambda vectors to zero, that
# is lambda to lambda_init, and the head norm's weight, a gain like that of every norm, to zero.
_NO_DECAY = re.compile(r"(^|\.)(lambda_[qk][12]|subln\.weight)$")


class NonFiniteLossError(RuntimeError):
    """The loss became NaN or infinite."""


def layer_lambdas(model: torch.nn.Module) -> list[float]:
    """lambda (Eq. 2, arXiv:2410.05258) of every layer, first to last; empty for a Transformer.

    With sharded parameters (FSDP2, DeepSpeed ZeRO-3) every process must call it.
    """
    layers = [module for module in model.modules() if isinstance(module, DiffTransformerAttention)]
    vectors = [vector for x in layers for vector in (x.lambda_q1, x.lambda_k1, x.lambda_q2, x.lambda_k2)]
    gathered: AbstractContextManager = nullcontext()
    if any(hasattr(vector, "ds_id") for vector in vectors):  # sharded by ZeRO-3
        import deepspeed

        gathered = deepspeed.zero.GatheredParameters(vectors)
    with torch.no_grad(), gathered:
        values = [layer.get_lambda() for layer in layers]
        return [(value.full_tensor() if isinstance(value, DTensor) else value).item() for value in values]


class RunTrainer(Trainer):
    """transformers' `Trainer` with the above. It also mixes into TRL's: `class MyTrainer(RunTrainer, SFTTrainer)`.

    Args, in addition to the trainer's own:
        peak_flops_per_device: The FLOP/s of which MFU is a share; by default `budget.peak_flops`. None logs no MFU.
        record_batches: Write a digest of every step's tokens to the output folder (`BatchRecord`).
    """

    def __init__(self, *args, peak_flops_per_device: float | None = None, record_batches: bool = False, **kwargs):
        super().__init__(*args, **kwargs)
        self._record = BatchRecord(self.args.output_dir, self.args.process_index) if record_batches else None
        if self._record is not None:
            self.add_callback(self._record)
        if peak_flops_per_device is None and self.args.device.type == "cuda":
            peak_flops_per_device = peak_flops(torch.cuda.get_device_name(self.args.device))
        self.peak_flops_per_device = peak_flops_per_device
        frozen = any(not parameter.requires_grad for parameter in self.model.parameters())
        self._trainable_parameters = self.get_num_trainable_parameters() if frozen else None
        self._rows: list[int] | None = None
        self._num_tokens, self._num_flops = 0, 0.0
        self._since: float | None = None

    def get_decay_parameter_names(self, model) -> list[str]:
        return [name for name in super().get_decay_parameter_names(model) if not _NO_DECAY.search(name)]

    def _prepare_inputs(self, inputs):
        rows = inputs.pop("row", None)  # the rows' numbers in the dataset, which the model does not take
        self._rows = None if rows is None else torch.as_tensor(rows).tolist()
        return super()._prepare_inputs(inputs)

    def training_step(self, model, inputs, num_items_in_batch=None):
        if self._since is None:
            self._since = time.monotonic()
        if self._record is not None:
            self._record.see(inputs)
        loss = super().training_step(model, inputs, num_items_in_batch)
        if not math.isfinite(loss.item()):
            self._raise_non_finite(loss.item(), inputs)
        batch_size, length = inputs["input_ids"].shape
        # Tensor-parallel processes share a batch; others have their own tokens, or their part of a sequence
        tokens = batch_size * length * self.accelerator.num_processes // self.get_tp_size()
        self._num_tokens += tokens
        config = self.accelerator.unwrap_model(self.model).config
        flops = model_flops_per_token(config, length * self.get_sp_size(), self._trainable_parameters)
        self._num_flops += tokens * flops
        return loss

    def evaluate(self, *args, **kwargs):
        """Excludes the time of the evaluation from that of the training."""
        begin = time.monotonic()
        measures = super().evaluate(*args, **kwargs)
        if self._since is not None:
            self._since += time.monotonic() - begin
        return measures

    def _raise_non_finite(self, loss: float, inputs: dict) -> None:
        step = self.state.global_step
        file = Path(self.args.output_dir) / f"non_finite_step_{step}_process_{self.args.process_index}.safetensors"
        batch = {name: value.detach().cpu() for name, value in inputs.items() if isinstance(value, torch.Tensor)}
        # Cloned: safetensors rejects tensors that share memory
        save_file({name: value.clone().contiguous() for name, value in batch.items()}, file)
        logged = next((entry for entry in reversed(self.state.log_history) if "lambda/layer_00" in entry), {})
        last = [f"{value:.4f}" for name, value in logged.items() if name.startswith("lambda/")]
        raise NonFiniteLossError(
            f"The loss of a batch in step {step + 1} is {loss}. Rows of the dataset: "
            f"{'not numbered' if self._rows is None else self._rows}; the batch is saved in {file}. "
            f"Last lambdas in the log, by layer: {', '.join(last) or 'none'}. This step did not change the weights. "
            "Check the batch and the gradient norms before it; resume from the last checkpoint with "
            "--resume_from_checkpoint last and a lower learning rate or max_grad_norm, or without these rows."
        )

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        if "loss" in logs:
            now = time.monotonic()
            seconds = now - (now if self._since is None else self._since)
            if self._num_tokens and seconds > 0:
                logs["tokens_per_second"] = self._num_tokens / seconds
                if self.peak_flops_per_device is not None:
                    peak = self.peak_flops_per_device * self.accelerator.num_processes
                    logs["mfu"] = self._num_flops / seconds / peak
            self._num_tokens, self._num_flops, self._since = 0, 0.0, now
            logs |= {f"lambda/layer_{i:02d}": value for i, value in enumerate(layer_lambdas(self.model))}
        super().log(logs, start_time)

    def _save_checkpoint(self, model, trial) -> None:
        """Seals the checkpoint once it is on disk, and only then deletes older ones."""
        output_dir = Path(self._get_output_dir(trial=trial))
        checkpoint = output_dir / f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
        limit, self.args.save_total_limit = self.args.save_total_limit, None
        try:
            super()._save_checkpoint(model, trial)
            self.accelerator.wait_for_everyone()
            if self.args.should_save:
                seal(checkpoint)
        except BaseException:
            # Half a checkpoint would keep a full disk full. Other processes may still be writing theirs.
            if self.accelerator.num_processes == 1:
                shutil.rmtree(checkpoint, ignore_errors=True)
            logger.error(
                f"{checkpoint} could not be saved and will be ignored; the checkpoints before it are untouched. Make "
                "room if the disk is full, then resume from the last one with --resume_from_checkpoint last."
            )
            raise
        finally:
            self.args.save_total_limit = limit
        if self.args.should_save:
            rotate_checkpoints(str(output_dir), limit, self.state.best_model_checkpoint)

    def save_whole_model(self, folder: Path) -> None:
        """Saves model and tokenizer in a folder that appears whole or not at all. Every process must call it."""
        self.accelerator.unwrap_model(self.model).config.use_cache = True  # the trainer turned it off
        with ExitStack() as stack:
            own = stack.enter_context(whole_folder(folder, 0, overwrite=True)) if self.args.should_save else None
            # Sharded models are gathered, or written, by all processes: they need to know the folder of the first
            (first,) = broadcast_object_list([own])
            self.save_model(str(own or first))
            self.accelerator.wait_for_everyone()
        self.accelerator.wait_for_everyone()
