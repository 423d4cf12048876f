# Copyright 2026 The diff_transformer authors. Licensed under the MIT License.
"""The command line: `diff-transformer COMMAND ...` or `python -m diff_transformer COMMAND ...`.

Our commands are registered on the command line of transformers, whose own commands (`serve FOLDER`, `chat`, ...) find
the model registered.
"""

import sys
from functools import partial
from importlib import import_module

import click
import transformers
from transformers.cli.transformers import app
from transformers.cli.transformers import main as transformers_main

import diff_transformer  # registers the model

from .extras import exit_without, skip_unused_deepspeed

# Command: the subpackage whose `__main__` runs it, its line of help
COMMANDS = {
    "convert": ("conversion", "Convert a checkpoint from one layout to another."),
    "verify": ("conversion", "Compare the logits of two checkpoints."),
    "evaluate": ("evaluation", "Evaluate one or several models with a protocol."),
    "report": ("evaluation", "Render the results of evaluations as Markdown and HTML."),
    "reproduce": ("reproduction", "Measure what each part of DIFF does to models that you train."),
    "upload": ("hub_upload", "Upload a model or an adapter to the Hub, with a model card."),
}


def run(command: str, arguments: tuple[str, ...]) -> None:
    """Runs one of our commands and exits with its code, or with a message if a package of an extra is missing."""
    module, _ = COMMANDS[command]
    # The parsers of these two know both of their commands by name
    prefix = [command] if module in ("conversion", "evaluation") else []
    skip_unused_deepspeed()
    with exit_without():
        sys.exit(import_module(f"diff_transformer.{module}.__main__").main([*prefix, *arguments]))


def print_version() -> None:
    print(f"diff_transformer {diff_transformer.__version__}\ntransformers {transformers.__version__}")


for _command in app.commands.values():
    _command.topic = "transformers"  # type: ignore[attr-defined]  # its heading in the help; ours are the main commands
for _name, (_, _help) in COMMANDS.items():
    app.add_command(
        click.Command(
            _name,
            callback=partial(run, _name),
            help=_help,
            # The command's own parser reads all arguments, --help among them
            params=[click.Argument(["arguments"], nargs=-1, type=click.UNPROCESSED)],
            add_help_option=False,
            context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
        )
    )
app.add_command(click.Command("version", callback=print_version, help="Print our version and that of transformers."))
app.help = "Convert, evaluate, reproduce and upload Differential Transformers; serve them and chat with them."


def main() -> None:
    if sys.argv[1:2] and sys.argv[1] in (*COMMANDS, "version"):
        app()
    else:
        transformers_main()  # which also looks for a newer transformers


if __name__ == "__main__":
    main()
