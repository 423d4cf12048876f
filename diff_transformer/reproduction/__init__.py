# Copyright 2026 The diff_transformer authors. Licensed under the MIT License.
"""The matched pair: DIFF and its Transformer twin, trained on the same data, evaluated and compared with the paper.

study -> jobs (data, training, evaluation) -> results in one file (collect) -> findings -> report.
"""

SCALES = ("cpu", "gpu", "ci")  # the files in studies/
