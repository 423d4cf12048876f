# Copyright 2026 The diff_transformer authors. Licensed under the MIT License.
"""`diff-transformer upload`: stages a folder, checks it, writes its card, pushes all of it, and loads it back.

`model.push_to_hub(REPO_ID)` of transformers also pushes weights and code, without checks or card.
"""
