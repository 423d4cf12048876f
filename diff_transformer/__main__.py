# Copyright 2026 The diff_transformer authors. Licensed under the MIT License.
"""transformers' own command line with the model registered: `python -m diff_transformer serve FOLDER`, `... chat`."""

from transformers.cli.transformers import main

import diff_transformer  # noqa: F401  (registers the model)

if __name__ == "__main__":
    main()
