# Copyright 2026 The diff_transformer authors. Licensed under the MIT License.
"""Upload a model to the Hub, with a card that states only what is known about it.

`diff-transformer upload FOLDER REPO_ID` stages FOLDER (`staging`), checks it (`checks`), writes its card from the
configuration, the training and the evaluation results (`card`), pushes everything in one commit (`push`), and loads
it back from the Hub in a clean process that has transformers alone (`clean_load`).
`model.push_to_hub(REPO_ID)` of transformers also pushes weights and code, without checks or card.
"""
