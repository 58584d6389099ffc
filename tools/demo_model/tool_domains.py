"""The tools that the demo model learns to call: what users ask for in each domain, and the values of parameters. Data,
and the random choice of one value.
"""

from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from tools.demo_model import lexicon as words

Value = str | int | float | bool


@dataclass(frozen=True, slots=True)
class Slot:
    """One parameter of the tools of a domain."""

    names: tuple[str, ...]
    kind: str  # a key of VALUES


@dataclass(frozen=True, slots=True)
class Domain:
    """Tools that do the same under several names, and what users say to have one called.

    `{0}`, `{1}`, ... in a question are the values of the parameters. A question without a place for a parameter leaves
    it out of the call.
    """

    names: tuple[str, ...]
    about: tuple[str, ...]  # descriptions
    slots: tuple[Slot, ...]
    questions: tuple[str, ...]
    topic: str = ""  # a conversation has one tool of each topic; the default is the first name
    is_answered_without: bool = False  # a sum, or a fact that a text may state: never refused


_TOWNS = ("New York", "Los Angeles", "San Francisco", "New Delhi", "Hong Kong", "Cape Town", "Mexico City", "Sao Paulo")
_STATES = ("San Francisco, CA", "Boston, MA", "Austin, TX", "Paris, France", "Berlin, Germany", "London, UK")
_LANGUAGES = "French German Spanish Italian English Polish Dutch Greek Russian Chinese Japanese Turkish Arabic".split()
_CURRENCIES = "euros dollars pounds francs yen crowns EUR USD GBP CHF JPY SEK".split()
_ENDINGS = "txt md py json csv log yaml html".split()
_UNITS = "metres kilometres miles feet inches grams pounds litres hours minutes seconds".split()
_DAYS = ("today", "tomorrow", "next week", *words.DAYS)


def _city(rng: Random) -> str:
    kind = rng.random()
    if kind < 0.6:
        return rng.choice(words.CITIES)
    if kind < 0.75:
        return rng.choice(_TOWNS if rng.random() < 0.6 else _STATES)
    return words.invented_word(rng).capitalize()


def _person(rng: Random) -> str:
    name = rng.choice(words.NAMES) if rng.random() < 0.75 else words.invented_word(rng).capitalize()
    return name if rng.random() < 0.8 else f"{name} {words.invented_word(rng).capitalize()}"


def _word(rng: Random) -> str:
    kind = rng.random()
    if kind < 0.5:
        return rng.choice(words.LOOSE)
    return rng.choice(words.OBJECTS + words.THINGS) if kind < 0.75 else words.invented_word(rng)


def _phrase(rng: Random) -> str:
    return " ".join(_word(rng) if rng.random() < 0.75 else rng.choice(words.LITTLE) for _ in range(rng.randint(2, 6)))


def _thing(rng: Random) -> str:
    return f"{rng.choice(words.COLOURS + words.ADJECTIVES)} {rng.choice(words.OBJECTS)}"


def _whole(rng: Random) -> int:
    return rng.randrange(10 ** rng.choices((1, 2, 3, 4), weights=(3, 4, 2, 1))[0])


def _number(rng: Random) -> int | float:
    if rng.random() < 0.75:
        return _whole(rng)
    return float(f"{rng.randrange(100)}.{rng.choice('123456789')}")


def _expression(rng: Random) -> str:
    parts = [str(_whole(rng))]
    for _ in range(rng.choice((1, 1, 2))):
        parts += [rng.choice("+-*/"), str(_whole(rng))]
    return (" " if rng.random() < 0.7 else "").join(parts)


def _path(rng: Random) -> str:
    name = f"{_word(rng)}.{rng.choice(_ENDINGS)}"
    return name if rng.random() < 0.6 else f"{'/' if rng.random() < 0.4 else ''}{_word(rng)}/{name}"


def _text(rng: Random) -> str:
    """Return a value of any form: what a user may give to a tool that no domain has."""
    return str(rng.choice((_city, _person, _word, _word, _phrase, _thing, words.code, _path))(rng))


VALUES: dict[str, Callable[[Random], Value]] = {
    "city": _city,
    "person": _person,
    "word": _word,
    "phrase": _phrase,
    "thing": _thing,
    "whole": _whole,
    "number": _number,
    "small": lambda rng: rng.randint(1, 60),
    "boolean": lambda rng: rng.random() < 0.5,
    "expression": _expression,
    "path": _path,
    "text": _text,
    "code": words.code,
    "ticker": lambda rng: "".join(rng.choices("ABCDEFGHIJKLMNOPQRSTUVWXYZ", k=rng.randint(2, 4))),
    "language": lambda rng: rng.choice(_LANGUAGES),
    "currency": lambda rng: rng.choice(_CURRENCIES),
    "unit": lambda rng: rng.choice(_UNITS),
    "degrees": lambda rng: rng.choice(("celsius", "fahrenheit")),
    "day": lambda rng: rng.choice(_DAYS),
    "clock": lambda rng: f"{rng.randint(0, 23)}:{rng.randrange(60):02}",
    "room": lambda rng: rng.choice(words.PLACES),
    "colour": lambda rng: rng.choice(words.COLOURS),
}
"""Random values by the kind of a parameter. The type of a value decides the type in the parameter's schema."""

ENUMS: dict[str, list[str]] = {
    "degrees": ["celsius", "fahrenheit"],
    "colour": words.COLOURS[:4],
    "currency": _CURRENCIES[:4],
}
"""Kinds whose schema may list the values."""

_CITY = Slot(("city", "location", "place", "town", "city_name"), "city")
_PERSON = Slot(("name", "person", "who", "contact", "recipient"), "person")

DOMAINS: tuple[Domain, ...] = (
    Domain(
        ("get_weather", "weather", "get_current_weather", "getWeather", "fetch_weather", "weather_lookup"),
        ("Return the weather of a city.", "Get the current weather in a given location", "Weather"),
        (_CITY, Slot(("unit", "units", "format"), "degrees")),
        (
            "What is the weather in {0}?",
            "What is the weather in {0}?",
            "How is the weather in {0}?",
            "What's the weather like in {0}?",
            "What is the weather like in {0} in {1}?",
            "Weather in {0}?",
            "Tell me the weather in {0}.",
            "Is it raining in {0}?",
            "Do I need an umbrella in {0}?",
            "How warm is it in {0}?",
            "What is the temperature in {0} in {1}?",
            "How is the weather in {0}, in {1}?",
            "Look up the weather in {0}.",
            "Is it cold in {0}?",
            "What is the weather in {0} right now?",
        ),
    ),
    Domain(
        ("get_forecast", "weather_forecast", "forecast"),
        ("Return the forecast of the weather.", "Forecast of a city for a day"),
        (_CITY, Slot(("day", "date", "when"), "day")),
        (
            "What is the forecast for {0}?",
            "What will the weather be in {0} {1}?",
            "Will it rain in {0} {1}?",
            "Give me the forecast for {0} for {1}.",
        ),
    ),
    Domain(
        ("get_time", "get_current_time", "current_time", "time_in", "getTime", "clock"),
        ("Return the time in a city.", "Get the current time in a place", "Local time"),
        (Slot(("city", "location", "timezone", "place"), "city"),),
        (
            "What time is it in {0}?",
            "Tell me the time in {0}.",
            "What is the time in {0}?",
            "How late is it in {0}?",
            "What is the local time in {0}?",
            "Do you know what time it is in {0}?",
        ),
    ),
    Domain(
        ("get_stock_price", "stock_price", "get_quote", "stock_quote"),
        ("Return the price of a stock.", "Get the stock price of a company"),
        (Slot(("symbol", "ticker", "company"), "ticker"),),
        (
            "What is the stock price of {0}?",
            "How much is a share of {0}?",
            "What is {0} trading at?",
            "Get the quote of {0}.",
            "How is the stock {0} doing?",
            "Look up the price of {0} stock.",
        ),
    ),
    Domain(
        ("add", "add_numbers", "sum", "plus", "addition"),
        ("Add two numbers.", "Return the sum of a and b", "Adds two integers"),
        (Slot(("a", "x", "first", "left", "num1"), "number"), Slot(("b", "y", "second", "right", "num2"), "number")),
        ("What is {0} plus {1}?", "Add {0} and {1}.", "What is {0} + {1}?", "{0} + {1}", "Sum of {0} and {1}?"),
        topic="arithmetic",
        is_answered_without=True,
    ),
    Domain(
        ("multiply", "multiply_numbers", "times", "product"),
        ("Multiply two numbers.", "Return the product of a and b"),
        (Slot(("a", "x", "first", "left"), "number"), Slot(("b", "y", "second", "right"), "number")),
        (
            "What is {0} times {1}?",
            "Multiply {0} by {1}.",
            "What is {0} * {1}?",
            "Multiply {0} and {1}.",
            "Product of {0} and {1}?",
        ),
        topic="arithmetic",
        is_answered_without=True,
    ),
    Domain(
        ("subtract", "minus", "difference"),
        ("Subtract b from a.", "Return the difference of two numbers"),
        (Slot(("a", "x", "minuend"), "number"), Slot(("b", "y", "subtrahend"), "number")),
        ("What is {0} minus {1}?", "What is {0} - {1}?", "Subtract {1} from {0}."),
        topic="arithmetic",
        is_answered_without=True,
    ),
    Domain(
        ("calculate", "calculator", "compute", "evaluate", "eval_expression"),
        ("Evaluate an arithmetic expression.", "A calculator", "Compute the value of an expression"),
        (Slot(("expression", "expr", "formula", "input"), "expression"),),
        ("What is {0}?", "Calculate {0}.", "Compute {0}.", "How much is {0}?", "Work out {0}.", "{0} = ?"),
        topic="arithmetic",
        is_answered_without=True,
    ),
    Domain(
        ("translate", "translate_text", "translator"),
        ("Translate a text.", "Translate text into another language"),
        (
            Slot(("text", "phrase", "words"), "phrase"),
            Slot(("language", "target_language", "to", "target"), "language"),
        ),
        (
            'Translate "{0}" to {1}.',
            "Translate '{0}' into {1}.",
            'How do you say "{0}" in {1}?',
            'What is "{0}" in {1}?',
            "Translate to {1}: {0}",
        ),
    ),
    Domain(
        ("convert_currency", "currency_converter", "exchange", "convert_money"),
        ("Convert money to another currency.", "Currency conversion"),
        (
            Slot(("amount", "value", "sum"), "number"),
            Slot(("from", "from_currency", "source"), "currency"),
            Slot(("to", "to_currency", "target"), "currency"),
        ),
        (
            "Convert {0} {1} to {2}.",
            "How much is {0} {1} in {2}?",
            "Change {0} {1} into {2}.",
            "What are {0} {1} in {2}?",
        ),
    ),
    Domain(
        ("convert_units", "unit_converter", "convert_unit"),
        ("Convert a number to another unit.", "Unit conversion"),
        (
            Slot(("value", "amount", "number"), "number"),
            Slot(("from_unit", "from", "unit"), "unit"),
            Slot(("to_unit", "to", "target"), "unit"),
        ),
        ("Convert {0} {1} to {2}.", "How many {2} are {0} {1}?", "What is {0} {1} in {2}?"),
    ),
    Domain(
        ("send_message", "send_sms", "message", "sendMessage", "notify"),
        ("Send a message to a person.", "Send a text message"),
        (
            Slot(("to", "recipient", "name", "contact"), "person"),
            Slot(("text", "message", "body", "content"), "phrase"),
        ),
        (
            'Send {0} the message "{1}".',
            'Tell {0} "{1}".',
            'Send "{1}" to {0}.',
            "Send a message to {0}: {1}",
            'Write {0} a message that says "{1}".',
        ),
    ),
    Domain(
        ("send_email", "email", "write_email", "send_mail"),
        ("Send an e-mail.", "Write an email to a person"),
        (Slot(("to", "recipient", "address"), "person"), Slot(("subject", "title", "topic"), "phrase")),
        ('Send an email to {0} with the subject "{1}".', "Email {0} about {1}.", "Write an email to {0} about {1}."),
    ),
    Domain(
        ("call_person", "phone_call", "make_call", "dial"),
        ("Call a person by phone.", "Start a phone call"),
        (_PERSON,),
        ("Call {0}.", "Please phone {0}.", "I want to talk to {0} on the phone.", "Dial {0}.", "Give {0} a call."),
    ),
    Domain(
        ("get_phone_number", "lookup_contact", "find_contact", "phone_book"),
        ("Return the phone number of a person.", "Look up a contact"),
        (_PERSON,),
        (
            "What is the phone number of {0}?",
            "Find the number of {0}.",
            "How can I reach {0}?",
            "Look up {0} in my contacts.",
        ),
        is_answered_without=True,
    ),
    Domain(
        ("set_alarm", "create_alarm", "alarm", "wake_up"),
        ("Set an alarm.", "Set the alarm clock"),
        (Slot(("time", "at", "when"), "clock"),),
        ("Set an alarm for {0}.", "Wake me at {0}.", "Wake me up at {0}.", "I need an alarm at {0}."),
    ),
    Domain(
        ("set_timer", "start_timer", "timer", "countdown"),
        ("Start a timer.", "Set a timer of some minutes"),
        (Slot(("minutes", "duration", "duration_minutes", "length"), "small"),),
        (
            "Set a timer for {0} minutes.",
            "Start a timer of {0} minutes.",
            "Remind me in {0} minutes.",
            "{0} minutes timer please.",
        ),
    ),
    Domain(
        ("set_reminder", "create_reminder", "remind_me", "add_reminder"),
        ("Create a reminder.", "Remind the user of something"),
        (Slot(("text", "task", "what", "title"), "phrase"), Slot(("day", "when", "date"), "day")),
        ('Remind me of "{0}" {1}.', "Remind me to {0}.", "Set a reminder: {0}", 'Set a reminder for {1}: "{0}".'),
    ),
    Domain(
        ("search", "web_search", "search_web", "google", "find"),
        ("Search the web.", "Search the internet for a query", "Full text search"),
        (Slot(("query", "q", "text", "search_term"), "phrase"), Slot(("limit", "count", "max_results"), "small")),
        (
            "Search for {0}.",
            "Search the web for {0}.",
            'Search for "{0}".',
            "Look up {0} on the web.",
            "Find {1} pages about {0}.",
            "Google {0}.",
            "Search for {0} and show {1} results.",
        ),
    ),
    Domain(
        ("play_song", "play_music", "play", "start_music"),
        ("Play a song.", "Play music by its title"),
        (Slot(("title", "song", "track", "name"), "phrase"),),
        ("Play {0}.", "Play the song {0}.", 'I want to hear "{0}".', 'Please play "{0}".'),
    ),
    Domain(
        ("get_distance", "distance", "distance_between", "compute_distance"),
        ("Return the distance between two cities.", "Distance of two places"),
        (Slot(("from", "start", "origin", "city1"), "city"), Slot(("to", "end", "destination", "city2"), "city")),
        (
            "How far is it from {0} to {1}?",
            "What is the distance between {0} and {1}?",
            "How many kilometres are there from {0} to {1}?",
            "Distance from {0} to {1}?",
        ),
    ),
    Domain(
        ("get_route", "route", "directions", "plan_trip"),
        ("Plan a route.", "Directions from a place to another"),
        (Slot(("from", "start", "origin"), "city"), Slot(("to", "end", "destination"), "city")),
        (
            "How do I get from {0} to {1}?",
            "Show me the way from {0} to {1}.",
            "Plan a trip from {0} to {1}.",
            "Directions from {0} to {1}.",
        ),
    ),
    Domain(
        ("book_flight", "reserve_flight", "flight_booking"),
        ("Book a flight.", "Reserve a flight to a city"),
        (Slot(("to", "destination", "city"), "city"), Slot(("day", "date", "when"), "day")),
        ("Book a flight to {0}.", "Book a flight to {0} for {1}.", "I want to fly to {0} on {1}.", "Fly me to {0}."),
    ),
    Domain(
        ("book_table", "reserve_table", "make_reservation"),
        ("Reserve a table in a restaurant.", "Book a table"),
        (Slot(("restaurant", "place", "name"), "thing"), Slot(("people", "guests", "party_size"), "small")),
        (
            "Book a table for {1} at the {0}.",
            "Reserve a table at {0} for {1} people.",
            "We are {1} and want to eat at the {0}. Book a table.",
        ),
    ),
    Domain(
        ("get_order_status", "order_status", "track_order", "check_order"),
        ("Return the status of an order.", "Track an order by its number"),
        (Slot(("order_id", "id", "order", "number"), "code"),),
        (
            "Where is my order {0}?",
            "What is the status of order {0}?",
            "Track order {0}.",
            "Check the order {0}.",
            "Has order {0} arrived?",
        ),
    ),
    Domain(
        ("get_user", "find_user", "load_user", "user_info"),
        ("Return a user by its id.", "Look up a user"),
        (Slot(("user_id", "id", "user"), "whole"),),
        ("Who is user {0}?", "Show me user {0}.", "Load the user with the id {0}.", "Get user {0}."),
    ),
    Domain(
        ("turn_on_light", "light_on", "switch_on_light", "lights"),
        ("Turn on the light of a room.", "Switch on a lamp"),
        (Slot(("room", "place", "where"), "room"),),
        (
            "Turn on the light in the {0}.",
            "It is dark in the {0}.",
            "Light in the {0}, please.",
            "Switch the light on in the {0}.",
        ),
    ),
    Domain(
        ("set_temperature", "set_thermostat", "heat", "thermostat"),
        ("Set the temperature of a room.", "Control the heating"),
        (Slot(("room", "place", "zone"), "room"), Slot(("degrees", "temperature", "value"), "small")),
        ("Set the {0} to {1} degrees.", "Heat the {0} to {1} degrees.", "Make it {1} degrees in the {0}."),
    ),
    Domain(
        ("get_news", "news", "latest_news", "headlines"),
        ("Return news about a topic.", "Latest headlines"),
        (Slot(("topic", "subject", "about", "category"), "word"),),
        ("What is the news about {0}?", "Show me the news on {0}.", "Any news about {0}?", "Headlines about {0}?"),
    ),
    Domain(
        ("define_word", "dictionary", "lookup_word", "define"),
        ("Return the meaning of a word.", "A dictionary"),
        (Slot(("word", "term", "entry"), "word"),),
        ('What does "{0}" mean?', "What does the word {0} mean?", "Define {0}.", "What is the meaning of {0}?"),
    ),
    Domain(
        ("create_note", "add_note", "save_note", "write_note", "remember"),
        ("Save a note.", "Write down a text"),
        (Slot(("text", "note", "content"), "phrase"),),
        ('Write down "{0}".', "Make a note: {0}", "Save this note: {0}", 'Note "{0}".'),
    ),
    Domain(
        ("add_to_list", "add_item", "shopping_list", "buy"),
        ("Add a thing to the shopping list.", "Shopping list"),
        (Slot(("item", "thing", "product"), "thing"), Slot(("count", "quantity", "amount"), "small")),
        (
            "Add {0} to the shopping list.",
            "Put {1} {0} on my list.",
            "Buy {1} {0}.",
            "I need a {0}. Add it to the list.",
        ),
    ),
    Domain(
        ("get_calendar", "calendar", "list_events", "get_events"),
        ("Return the events of a day.", "Look into the calendar"),
        (Slot(("day", "date", "when"), "day"),),
        ("What do I have to do {0}?", "What is in my calendar {0}?", "Am I free {0}?", "Show my events for {0}."),
    ),
    Domain(
        ("read_file", "open_file", "cat", "load_file", "view"),
        ("Read a file.", "Return the content of a file"),
        (Slot(("path", "file", "filename", "file_path"), "path"),),
        ("Read the file {0}.", "Show me {0}.", "What is in {0}?", "Open {0}.", "Print the content of {0}."),
    ),
    Domain(
        ("delete_file", "remove_file", "rm"),
        ("Delete a file.", "Remove a file"),
        (Slot(("path", "file", "filename"), "path"),),
        ("Delete {0}.", "Remove the file {0}.", "Please delete the file {0}."),
    ),
    Domain(
        ("roll_dice", "dice", "throw_dice"),
        ("Roll dice.", "Throw some dice"),
        (Slot(("count", "dice", "number"), "small"), Slot(("sides", "faces"), "small")),
        ("Roll {0} dice.", "Roll {0} dice with {1} sides.", "Throw {0} dice."),
    ),
    Domain(
        ("get_population", "population", "count_people"),
        ("Return the number of people in a city.", "Population of a place"),
        (_CITY,),
        ("How many people live in {0}?", "What is the population of {0}?", "How big is {0}?", "Population of {0}?"),
    ),
    Domain(
        ("get_current_date", "today", "get_date", "current_date"),
        ("Return the date of today.", "Today's date"),
        (),
        ("What day is it today?", "What is the date?", "Which date is it?", "Tell me the date."),
        is_answered_without=True,
    ),
    Domain(
        ("take_screenshot", "screenshot", "capture_screen"),
        ("Take a picture of the screen.", "Screenshot"),
        (),
        ("Take a screenshot.", "Show me the screen.", "Make a picture of the screen."),
    ),
)

VERBS = """get find fetch list read write send open close create delete update check count search lookup calculate
convert compute start stop set add remove show load save move copy query""".split()
GETTERS = "get get get fetch find lookup read query show check".split()
PARAMETERS = """name id city item key query person value text amount count number code user title date x y a b n limit
size color level path topic message age color_code user_id room order product source target""".split()
