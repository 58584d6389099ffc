"""The words the corpus is made of, and invented words for names that no list contains. Knows no sentence."""

from random import Random

COLOURS = """red blue green yellow black white grey brown orange purple pink silver golden violet crimson turquoise
beige amber scarlet ivory""".split()
ADJECTIVES = """
small large tiny huge old new heavy light round square flat tall short long wide narrow wooden metal plastic
paper glass leather stone iron copper broken shiny dusty clean dirty soft hard warm cold dark bright empty full
open locked secret hidden quiet loud striped painted rusty polished folded curved smooth rough thick thin
strange plain northern southern eastern western first second third last""".split()
OBJECTS = """box bag lamp door drawer chest safe locker suitcase cabinet case bottle book folder basket bucket crate
barrel jar cup bowl plate table chair desk shelf mirror clock watch phone camera radio printer laptop server router
scanner screen keyboard bicycle car truck van bus boat ship train plane rocket robot engine pump machine tool hammer
drill ladder rope tent backpack wallet purse envelope letter card ticket parcel package container vault gate garage
house hut tower castle bridge tunnel room office kitchen cellar attic garden shed barn stable window curtain carpet
blanket pillow bed sofa stove oven fridge kettle pan knife fork spoon piano guitar violin drum flute trumpet statue
painting vase candle lantern torch map compass telescope microscope globe toy doll kite ball puzzle coin medal crown
ring necklace key helmet jacket coat shirt boot glove hat scarf umbrella flag badge folder notebook pencil brush
badger falcon lion tiger wolf fox bear otter eagle owl dolphin""".split()
NAMES = """Anna Tom Maria Peter Laura David Sofia James Emma Lucas Nina Oscar Clara Felix Julia Martin Elena Simon Alice
Robert Sarah Daniel Eva Paul Lena Victor Rosa Henry Mia Leo Ines Hugo Nora Adam Zoe Max Ella Karl Ruth Ivan Olga Bruno
Greta Jonas Carla Samir Leila Omar Aisha Kenji Yuki Chen Mei Raj Priya Carlos Lucia Diego Marta Pablo Erik Ingrid Lars
Freya Liam Grace Noah Hannah Jack Chloe Ben Kate Sam Lucy Alex John Mary Bob Carol Dave Frank""".split()
PLACES = """kitchen garden cellar attic garage office library hall bedroom bathroom workshop stable barn tower harbour
station market museum school hospital church park forest theatre bakery bank hotel airport warehouse laboratory
basement courtyard corridor closet lobby""".split()
CITIES = """Paris London Berlin Madrid Rome Vienna Oslo Stockholm Helsinki Lisbon Dublin Warsaw Prague Athens Budapest
Brussels Tokyo Cairo Delhi Lima Boston Chicago Toronto Sydney Nairobi Lagos Seoul Bangkok Munich Milan Geneva Porto
Krakow Lyon Hamburg Zurich Denver Austin Seattle Montreal""".split()
DAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()
MONTHS = "January February March April May June July August September October November December".split()
FAVOURITES = {
    "fruit": "apple banana mango cherry peach pear plum grape melon lemon kiwi fig".split(),
    "animal": "cat dog horse rabbit fox owl bear dolphin tiger elephant penguin turtle".split(),
    "colour": COLOURS[:12],
    "drink": "tea coffee milk water juice lemonade cocoa cider".split(),
    "sport": "football tennis chess swimming running cycling skiing rowing sailing boxing".split(),
    "season": "spring summer autumn winter".split(),
    "subject": "history physics music biology chemistry geography art maths".split(),
}
PASSWORDS = """sunrise marble thunder velvet orchard lantern comet harvest meadow pepper willow anchor glacier saffron
puzzle canyon feather bramble ember cobalt""".split()
PEOPLE = """teacher baker farmer doctor sailor painter gardener driver student neighbour child woman man boy girl friend
captain singer writer nurse clerk guard tourist merchant""".split()
ANIMALS = (
    "cat dog horse rabbit fox wolf bear sheep goat cow duck goose mouse hen frog bee bird swan squirrel donkey".split()
)
THINGS = """apples flowers letters stones books lamps boxes cups chairs coins maps songs stories clouds leaves
candles carrots potatoes shoes ropes shells tools toys pictures""".split()
MOTIONS = "walked ran went drove came moved turned hurried wandered travelled".split()
DEEDS = "found carried painted cleaned counted sold bought washed repaired moved dropped forgot opened closed".split()
MANNERS = "slowly quickly quietly happily carefully gladly calmly suddenly often rarely again together".split()
WEATHER = "sunny rainy windy cloudy foggy snowy stormy cold warm mild".split()
TIMES = [
    "in the morning",
    "in the evening",
    "at noon",
    "at night",
    "after lunch",
    "before dinner",
    "yesterday",
    "last week",
    "on Sunday",
    "in spring",
    "in winter",
    "every day",
    "once a year",
    "for an hour",
    "until dawn",
    "all day long",
]
LOOSE = """time water light road river hill field wind rain snow story word line paper plan reason idea question answer
song voice hand eye face heart mind world country city village street corner side end part place year week hour minute
money work life game party trip holiday price offer order list report page team group family member student class
system network signal power energy speed weight size shape sound picture film news mail message call visit meeting
good bad great small big long short young late early quick slow deep high low rich poor easy simple clear strange kind
make take give find keep hold bring leave begin show hear play run move live believe write stand lose pay meet learn
change lead understand watch follow stop create speak read spend grow open walk win teach offer remember consider
appear buy serve die send build stay fall cut reach raise pass sell decide return explain hope develop carry break
about above across after against along among around because before behind below beside between beyond during except
however although always never sometimes maybe perhaps almost already still again once twice together alone""".split()

LITTLE = """the the the the a a an of of to to and and in in is it that was for on are with as they be at one have this
from or had by but not what all were when we there can your which their if do will each how them then these so some her
would him into has more no could my than been who its now may down only must""".split()

_ONSETS = "b c d f g h j k l m n p r s t v w z br dr gr kr pl st tr th sh ch".split()
_VOWELS = "a e i o u ai ea oo".split()
_ENDS = ["", "", "n", "r", "l", "s", "k", "m", "t", "x", "nd", "rk"]


def invented_word(rng: Random) -> str:
    """A pronounceable word that is in no list, so that copying does not depend on known words."""
    return "".join(rng.choice(_ONSETS) + rng.choice(_VOWELS) + rng.choice(_ENDS) for _ in range(rng.randint(2, 3)))


def code(rng: Random) -> str:
    """A secret to look up: mostly four digits, sometimes three to six, sometimes with letters."""
    kind = rng.random()
    if kind < 0.72:
        return "".join(rng.choices("0123456789", k=4))
    if kind < 0.9:
        return "".join(rng.choices("0123456789", k=rng.choice((3, 5, 6))))
    letters = "".join(rng.choices("ABCDEFGHJKLMNPQRSTUVWXYZ", k=rng.randint(1, 2)))
    return letters + rng.choice(("", "-")) + "".join(rng.choices("0123456789", k=rng.randint(2, 4)))
