# Copyright 2026 The diff_transformer authors. Licensed under the MIT License.
"""The command line, `diff-transformer ...` or `python -m diff_transformer ...`.

`convert` and `verify` (`diff_transformer.conversion`), `evaluate` and `report` (`diff_transformer.evaluation`),
`upload` (`diff_transformer.hub_upload`) and `reproduce` (`diff_transformer.reproduction`) are ours; everything else is
transformers' own command line with the model registered: `serve FOLDER`, `chat`, ...
"""

import sys

from transformers.cli.transformers import main as transformers_main

import diff_transformer  # noqa: F401  (registers the model)


def main() -> None:
    if sys.argv[1:2] in (["convert"], ["verify"]):
        from diff_transformer.conversion.__main__ import main as conversion_main

        sys.exit(conversion_main())
    if sys.argv[1:2] in (["evaluate"], ["report"]):
        from diff_transformer.evaluation.__main__ import main as evaluation_main

        sys.exit(evaluation_main())
    if sys.argv[1:2] == ["upload"]:
        from diff_transformer.hub_upload.__main__ import main as upload_main

        sys.exit(upload_main(sys.argv[2:]))
    if sys.argv[1:2] == ["reproduce"]:
        try:
            from diff_transformer.reproduction.__main__ import main as reproduction_main
        except ModuleNotFoundError as error:
            sys.exit(f"error: {error.name} is not installed. Two extras are needed: pip install -e '.[train,eval]'")
        sys.exit(reproduction_main(sys.argv[2:]))
    transformers_main()


if __name__ == "__main__":
    main()
