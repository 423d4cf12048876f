# Copyright 2026 The diff_transformer authors. Licensed under the MIT License.
"""The paper's training: pretraining, the extension to 64K, and two stages of fine-tuning on mathematics."""
