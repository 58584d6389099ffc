"""Pictures with a number of two or three digits in a colour, and questions about them with their only right answers.

The digits come from a table of pixels, so that every version of Pillow draws the same picture.
"""

from dataclasses import dataclass
from io import BytesIO
from random import Random

from PIL import Image, ImageDraw

EDGE = 64
"""Width and height in pixels of what the model reads; its image processor resizes other pictures to it."""
GRID = 4
"""Numbers begin at multiples of so many pixels. Freely placed ones would take longer to train."""
INKS = {
    "red": (200, 30, 30),
    "green": (20, 140, 50),
    "blue": (35, 60, 210),
    "orange": (245, 135, 10),
    "purple": (140, 40, 170),
    "black": (15, 15, 15),
}
PAPERS = ((255, 255, 255), (240, 235, 215), (215, 230, 240), (225, 225, 225))
NUMBER_QUESTIONS = ("What number is in the picture?", "Which number do you see?", "Read the number.", "What is this?")
COLOUR_QUESTIONS = ("What colour is the number?", "Which colour do you see?", "What color is it?")
NO_PICTURE = "I see no picture."
"""The right answer to each question if the message has no picture: a cluster that loses pictures gives it."""
_COLUMNS, _ROWS = 5, 7
_DIGITS = (
    "01110 10001 10011 10101 11001 10001 01110",
    "00100 01100 00100 00100 00100 00100 01110",
    "01110 10001 00001 00110 01000 10000 11111",
    "01110 10001 00001 00110 00001 10001 01110",
    "00010 00110 01010 10010 11111 00010 00010",
    "11111 10000 11110 00001 00001 10001 01110",
    "01110 10000 10000 11110 10001 10001 01110",
    "11111 00001 00010 00100 01000 01000 01000",
    "01110 10001 10001 01110 10001 10001 01110",
    "01110 10001 10001 01111 00001 00001 01110",
)
"""Of each digit the rows of its pixels, from the top."""


@dataclass(frozen=True, slots=True)
class Picture:
    """The content of a picture. `left` and `top` are pixels of a square of `EDGE`.

    Each pixel of a digit is a square of `scale` pixels.
    """

    number: str
    colour: str
    paper: tuple[int, int, int]
    scale: int
    left: int
    top: int

    @property
    def boxes(self) -> list[tuple[int, int, int, int]]:
        """Return the left, top, right and bottom edge of each digit."""
        width, step = _COLUMNS * self.scale, _step(self.scale)
        lefts = [self.left + step * place for place in range(len(self.number))]
        return [(left, self.top, left + width, self.top + _ROWS * self.scale) for left in lefts]

    def draw(self) -> Image.Image:
        """Return the picture in RGB, `EDGE` pixels wide and high."""
        image = Image.new("RGB", (EDGE, EDGE), self.paper)
        pen = ImageDraw.Draw(image)
        for digit, (left, top, _, _) in zip(self.number, self.boxes, strict=True):
            for row, pixels in enumerate(_DIGITS[int(digit)].split()):
                for column, pixel in enumerate(pixels):
                    if pixel == "1":
                        x, y = left + column * self.scale, top + row * self.scale
                        pen.rectangle((x, y, x + self.scale - 1, y + self.scale - 1), fill=INKS[self.colour])
        return image

    def png(self, *, enlarged: int = 4) -> bytes:
        """Return a PNG file of the picture, `enlarged` times as wide and high."""
        edge, out = EDGE * enlarged, BytesIO()
        self.draw().resize((edge, edge), Image.Resampling.NEAREST).save(out, "PNG")
        return out.getvalue()


@dataclass(frozen=True, slots=True)
class VisualQuestion:
    """A question, the picture that comes before it or None, and the whole right answer."""

    picture: Picture | None
    text: str
    answer: str


def make_picture(rng: Random) -> Picture:
    """Return a picture whose number, colours, size and place are drawn from `rng`."""
    number = str(rng.randint(10, 999))
    scale = rng.choice((3, 4) if len(number) == 2 else (2, 3))
    width = _step(scale) * len(number) - (_step(scale) - _COLUMNS * scale)
    left, top = (rng.randrange(GRID, EDGE - length, GRID) for length in (width, _ROWS * scale))
    return Picture(number, rng.choice(tuple(INKS)), rng.choice(PAPERS), scale, left, top)


def make_question(rng: Random) -> VisualQuestion:
    """Return a question that is drawn from `rng`: most about a number, some about its colour, few without a picture."""
    picture, kind = make_picture(rng), rng.random()
    if kind < 0.08:
        return VisualQuestion(None, rng.choice(NUMBER_QUESTIONS + COLOUR_QUESTIONS), NO_PICTURE)
    if kind < 0.3:
        return VisualQuestion(picture, rng.choice(COLOUR_QUESTIONS), f"It is {picture.colour}.")
    return VisualQuestion(picture, rng.choice(NUMBER_QUESTIONS), f"The number is {picture.number}.")


def _step(scale: int) -> int:
    return (_COLUMNS + 1) * scale
