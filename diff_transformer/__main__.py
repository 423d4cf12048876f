# Copyright 2026 The diff_transformer authors. Licensed under the MIT License.
"""The command line, `diff-transformer ...` or `python -m diff_transformer ...`.

`convert` and `verify` are ours (`diff_transformer.conversion`); everything else is transformers' own command line with
the model registered: `serve FOLDER`, `chat`, ...
"""

import sys

from transformers.cli.transformers import main as transformers_main

import diff_transformer  # noqa: F401  (registers the model)


def main() -> None:
    if sys.argv[1:2] in (["convert"], ["verify"]):
        from diff_transformer.conversion.__main__ import main as conversion_main

        sys.exit(conversion_main())
    transformers_main()


if __name__ == "__main__":
    main()
