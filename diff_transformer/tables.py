# Copyright 2026 The diff_transformer authors. Licensed under the MIT License.
from .text_data import load_table as load_table
