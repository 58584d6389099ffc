"""One terminal for many processes."""

import io

from baton_serve.services.local.child import Console, LineSplitter


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_lines_are_named_and_aligned() -> None:
    output = io.StringIO()
    console = Console(output, ["router", "prefill-0"])
    console.line("router", "a")
    console.line("prefill-0", "b")
    assert output.getvalue() == "router    | a\nprefill-0 | b\n"


def test_json_lines_pass_as_they_are() -> None:
    output = io.StringIO()
    Console(output, ["router"], is_named=False).line("router", "{}")
    assert output.getvalue() == "{}\n"


def test_a_moving_line_is_replaced_and_needs_a_terminal() -> None:
    terminal = Terminal()
    console = Console(terminal, ["p"])
    console.moving("p", "10 %")
    console.moving("p", "20 %")
    console.line("p", "done")
    assert terminal.getvalue() == "p | 10 %\r\x1b[Kp | 20 %\r\x1b[Kp | done\n"
    plain = io.StringIO()
    Console(plain, ["p"]).moving("p", "10 %")
    assert plain.getvalue() == ""


def test_pieces_become_lines_and_a_carriage_return_ends_a_moving_one() -> None:
    splitter = LineSplitter()
    assert splitter.feed("a\nb") == [("a", True)]
    assert splitter.feed("c\r10 %\r20 %") == [("bc", False), ("10 %", False)]
    assert splitter.feed("\r\nlast") == [("20 %", True)]
    assert splitter.rest() == "last" and splitter.rest() == ""
