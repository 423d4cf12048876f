# Copyright 2026 The diff_transformer authors. Licensed under the MIT License.
"""The paper's measurements, for any causal language model of transformers, and the report of their results.

Each module of `protocols` is one measurement. The model never learns that it is evaluated, and a report is made from
files of results alone.
"""
