"""`holdfast web`: the console in a browser. It is a package of its own, `holdfast.web`, which needs an extra."""

from __future__ import annotations

from ..errors import Unsupported

TYPE_CHECKING = False
if TYPE_CHECKING:
    from .arguments import Parser


def configure(name: str, parser: Parser) -> None:
    try:
        from importlib import import_module

        command = import_module("holdfast.web.command")
    except ImportError as error:
        raise Unsupported(f"{error}. Install what the console needs: pip install 'holdfast[web]'") from None
    command.add_arguments(parser)
    parser.set_defaults(call=command.run)
