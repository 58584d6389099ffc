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


def test_an_error_of_several_instances_is_printed_once() -> None:
    output, now = io.StringIO(), [0.0]
    console = Console(output, ["p-0", "d-0"], clock=lambda: now[0])
    console.line("p-0", '12:00:00.000 ERROR   services.x baton prefill could not start exception="A\\nNo memory"')
    console.line("d-0", '12:00:01.000 ERROR   services.x baton decode could not start exception="A\\nNo memory"')
    console.line("d-0", '12:00:01.000 ERROR   services.x baton decode could not start exception="A\\nNo disk"')
    console.line("d-0", "12:00:01.000 INFO    services.x hello")
    console.line("p-0", "12:00:01.000 INFO    services.x hello")
    lines = output.getvalue().splitlines()
    assert [line.count("No memory") for line in lines] == [1, 0, 0, 0, 0]
    assert lines[1] == "d-0 | the same error as p-0"
    assert "No disk" in lines[2] and lines[3].endswith("hello") and lines[4].endswith("hello")


def test_the_same_error_much_later_is_printed_again() -> None:
    output, now = io.StringIO(), [0.0]
    console = Console(output, ["p-0", "d-0"], clock=lambda: now[0])
    console.line("p-0", "baton prefill: no space left on device")
    now[0] = 61.0
    console.line("d-0", "baton decode: no space left on device")
    assert output.getvalue().count("no space left") == 2
