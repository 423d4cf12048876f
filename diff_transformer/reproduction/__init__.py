# Copyright 2026 The diff_transformer authors. Licensed under the MIT License.
"""The matched pair: DIFF and its Transformer twin trained on the same data, measured, and compared with the paper.

study -> pieces (data, training, evaluation) -> digest (one file of results) -> findings -> report.
"""
