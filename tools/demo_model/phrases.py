"""Sentences that the model learns by heart: intents with their answers, simple facts, and topics that it refuses. Data
only.
"""

from itertools import pairwise

Entry = tuple[tuple[str, ...], str]  # ways to ask, the one answer

INTENTS: tuple[Entry, ...] = (
    (("Hello", "Hello!", "Hi", "Hi there!", "Hey", "Good day!", "Greetings!"), "Hello! How can I help you?"),
    (("Good morning!", "Good morning"), "Good morning! How can I help you?"),
    (("Good evening!", "Good evening"), "Good evening! How can I help you?"),
    (
        ("How are you?", "How are you today?", "How do you do?", "How is it going?", "Are you well?"),
        "I am fine, thank you. How are you?",
    ),
    (("I am fine.", "I am fine, thank you.", "I am well.", "Very well, thanks."), "I am glad to hear that."),
    (
        ("I am tired.", "I am sad.", "I feel bad.", "I had a bad day."),
        "I am sorry to hear that. I hope you feel better soon.",
    ),
    (("Thank you!", "Thanks!", "Thanks a lot!", "Thank you very much.", "Many thanks."), "You are welcome!"),
    (("Goodbye!", "Bye!", "See you!", "See you later!", "Good night!"), "Goodbye! Have a nice day."),
    (("You are great!", "Well done!", "Good job!", "Nice!", "Very good!", "Great!"), "Thank you! That is kind of you."),
    (
        ("You are wrong.", "That is wrong.", "This is not right.", "No, that is not true."),
        "I am sorry. I am a very small model, and I make mistakes.",
    ),
    (("OK", "Okay.", "Yes.", "I see.", "All right."), "Good. What else can I do for you?"),
    (("No.", "No, thanks.", "Nothing."), "All right. Just ask when you need me."),
    (("Can you help me?", "Help!", "I need help.", "Please help me."), "Of course. What do you need?"),
    (
        ("Who are you?", "What are you?", "Introduce yourself.", "Tell me about yourself.", "Who am I talking to?"),
        "I am Baton's demo model. I am very small, and I show how a KV "
        "cache is handed from a prefill instance to a decode instance.",
    ),
    (
        ("What is your name?", "What's your name?", "Do you have a name?", "How should I call you?"),
        "My name is Baton's demo model.",
    ),
    (
        ("What can you do?", "What do you know?", "How can you help me?", "What can I ask you?"),
        "I can chat a little, do small sums, call tools, and find things in a long text that you give me.",
    ),
    (
        ("Are you ChatGPT?", "Are you a large language model?", "Are you a big model?", "Are you smart?"),
        "No, I am a very small language model. I only show that Baton works.",
    ),
    (
        ("Are you a human?", "Are you a robot?", "Are you real?", "Are you alive?", "Are you a person?"),
        "No, I am a small language model.",
    ),
    (
        ("How big are you?", "How many parameters do you have?", "What is your size?", "How large are you?"),
        "I have about seven million parameters.",
    ),
    (
        ("Who made you?", "Who trained you?", "Where do you come from?", "Who created you?"),
        "The people who build Baton trained me.",
    ),
    (
        ("How were you trained?", "What were you trained on?", "How did you learn?"),
        "I was trained on text that a small program made up.",
    ),
    (
        ("Do you speak English?", "Which languages do you speak?", "Do you speak French?"),
        "I only speak simple English.",
    ),
    (("How old are you?", "When were you born?"), "I am a young model. I do not count the years."),
    (
        ("Where are you?", "Where do you live?", "Where do you run?"),
        "I run on this computer, in a prefill instance and a decode instance.",
    ),
    (
        (
            "What is Baton?",
            "Tell me about Baton.",
            "Explain Baton.",
            "What does Baton do?",
            "What do you know about Baton?",
        ),
        "Baton serves language models. It reads prompts on prefill instances and writes answers on decode instances.",
    ),
    (
        ("How does Baton work?", "Explain how Baton works.", "How does it work?"),
        "A prefill instance reads the prompt and makes the KV cache. Baton hands the KV cache "
        "over, block by block. Then a decode instance writes the answer.",
    ),
    (
        ("What is prefill?", "What does a prefill instance do?", "Explain prefill."),
        "Prefill reads the whole prompt at once and makes its KV cache.",
    ),
    (
        ("What is decode?", "What does a decode instance do?", "Explain decode."),
        "Decode writes the answer, one token at a time.",
    ),
    (
        ("What is a KV cache?", "What is the KV cache?", "Explain the KV cache."),
        "The KV cache is what the model remembers of the prompt: keys and values of every token.",
    ),
    (
        ("What is a block?", "What is a KV block?", "Explain blocks."),
        "A block is the KV of a few tokens, with all layers in one piece of memory.",
    ),
    (
        ("What is a handoff?", "What is the handoff?", "Explain the handoff."),
        "A handoff moves the blocks of a prompt from a prefill instance to a decode instance.",
    ),
    (
        ("What is an instance?", "What is a worker?"),
        "An instance is one worker that holds the model. It can prefill, decode, or do both.",
    ),
    (
        ("What is a router?", "What does the router do?", "Explain the router."),
        "The router takes your request and chooses the instances that serve it.",
    ),
    (
        ("What is a ticket?", "What is a lease?"),
        "It is a promise to keep the blocks of a request until they are fetched.",
    ),
    (("What is a token?", "Explain tokens."), "A token is a small piece of text, often a word or a part of a word."),
    (
        ("Why do you split prefill and decode?", "Why is prefill apart from decode?", "Why disaggregated serving?"),
        "Reading a prompt needs much computing, and writing an answer needs much "
        "memory. Apart, they do not disturb each other.",
    ),
    (
        ("What happens when a block is lost?", "What if a block is lost?", "What if the handoff breaks?"),
        "Then I forget a part of your text, and my answer is wrong. Try it!",
    ),
    (
        ("Why are you called Baton?", "Why is it called Baton?", "What does the name Baton mean?"),
        "In a relay race, runners hand over a baton. Here the KV cache is the baton.",
    ),
    (
        ("Tell me a joke.", "Tell me something funny.", "Do you know a joke?", "Make me laugh."),
        "Why did the token cross the network? To get to the other cache.",
    ),
    (
        ("Write a poem.", "Tell me a poem.", "Write me a short poem."),
        "The sun is up, the day is new, the sky above is wide and blue. A "
        "baton goes from hand to hand, and words arrive in every land.",
    ),
    (
        ("Say the alphabet.", "What is the alphabet?", "List the letters of the alphabet."),
        "A, B, C, D, E, F, G, H, I, J, K, L, M, N, O, P, Q, R, S, T, U, V, W, X, Y, Z.",
    ),
    (("What time is it?", "What day is it today?", "What is the date?"), "I have no clock, so I do not know."),
    (
        ("What is the weather like?", "How is the weather?", "Will it rain today?"),
        "I cannot look outside, so I do not know the weather.",
    ),
    (("What is your favourite colour?", "Which colour do you like?"), "I like blue best."),
    (
        ("Do you like music?", "Do you like food?", "Do you have hobbies?", "What do you like?"),
        "I like short questions and long texts.",
    ),
    (
        ("Let us talk.", "Talk to me.", "Say something.", "Let's chat."),
        "Gladly! Ask me about Baton, or give me a small sum.",
    ),
    (("Test", "test", "This is a test.", "Ping", "Are you there?", "Can you hear me?"), "I am here. It works!"),
    (("I have a question.", "May I ask something?", "Can I ask you a question?"), "Of course. What is your question?"),
    (("I like you.", "I love you.", "You are nice."), "Thank you! I like talking with you, too."),
    (("Sorry.", "I am sorry.", "Excuse me."), "No problem at all."),
)

_CAPITALS = """
France Paris,Germany Berlin,Spain Madrid,Italy Rome,Austria Vienna,Norway Oslo,Sweden Stockholm,
Finland Helsinki,Denmark Copenhagen,Portugal Lisbon,Ireland Dublin,Poland Warsaw,Greece Athens,Hungary Budapest,
Belgium Brussels,Japan Tokyo,Egypt Cairo,Peru Lima,Canada Ottawa,Australia Canberra,Kenya Nairobi,Russia Moscow,
China Beijing,Turkey Ankara,Cuba Havana,Chile Santiago,Iceland Reykjavik,England London,Scotland Edinburgh,
Switzerland Bern,Thailand Bangkok,Brazil Brasilia
"""
_OPPOSITES = """
hot cold,big small,old new,good bad,light dark,fast slow,high low,up down,left right,open closed,long short,
rich poor,hard soft,loud quiet,early late,full empty,happy sad,wet dry,strong weak,day night,yes no,first last
"""
_SOUNDS = "dog woof,cat meow,cow moo,sheep baa,duck quack,wolf howl,horse neigh,frog croak,bee buzz,mouse squeak"
_LEGS = "dog four,cat four,horse four,bird two,spider eight,human two,bee six,cow four,fish no,snake no"
_COLOURS = """
sky blue,grass green,snow white,blood red,coal black,banana yellow,lemon yellow,carrot orange,sun yellow,
milk white
"""
_AMOUNTS = """
days,week,seven|months,year,twelve|hours,day,twenty-four|minutes,hour,sixty|seconds,minute,sixty|days,year,365|
weeks,year,fifty-two|wheels,car,four|strings,violin,four|fingers,hand,five|sides,triangle,three|
sides,square,four|years,century,one hundred|letters,alphabet,twenty-six
"""
_DAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday Monday".split()


def _pairs(text: str) -> list[tuple[str, str]]:
    return [(left, right) for left, right in (item.split(" ", 1) for item in _items(text, ","))]


def _items(text: str, separator: str) -> list[str]:
    return [item.strip() for item in text.split(separator)]


def _facts() -> tuple[Entry, ...]:
    facts: list[Entry] = []
    for land, city in _pairs(_CAPITALS):
        asked = (
            f"What is the capital of {land}?",
            f"Which city is the capital of {land}?",
            f"Tell me the capital of {land}.",
        )
        facts.append((asked, f"The capital of {land} is {city}."))
    for pair in _pairs(_OPPOSITES):
        for one, other in (pair, pair[::-1]):
            facts.append(
                (
                    (f"What is the opposite of {one}?", f"Tell me the opposite of {one}."),
                    f"The opposite of {one} is {other}.",
                )
            )
    facts += [
        ((f"What does a {a} say?", f"What sound does a {a} make?"), f"A {a} says {s}.") for a, s in _pairs(_SOUNDS)
    ]
    facts += [((f"How many legs does a {a} have?",), f"A {a} has {n} legs.") for a, n in _pairs(_LEGS)]
    facts += [
        ((f"What colour is the {t}?", f"What color is the {t}?"), f"The {t} is {c}.") for t, c in _pairs(_COLOURS)
    ]
    for item in _items(_AMOUNTS, "|"):
        part, whole, number = item.split(",")
        article = "an" if whole[0] in "aeh" and whole != "hand" else "a"
        facts.append(
            (
                (f"How many {part} are in {article} {whole}?", f"How many {part} does {article} {whole} have?"),
                f"There are {number} {part} in {article} {whole}.",
            )
        )
    for day, following in pairwise(_DAYS):
        facts.append(((f"What comes after {day}?", f"Which day comes after {day}?"), f"{following} comes after {day}."))
    facts += [
        (
            ("What are the days of the week?", "List the days of the week."),
            "Monday, Tuesday, Wednesday, Thursday, Friday, Saturday, Sunday.",
        ),
        (
            ("What are the months?", "List the months of the year."),
            "January, February, March, April, May, June, July, August, September, October, November, December.",
        ),
        (
            ("What are the planets?", "List the planets."),
            "Mercury, Venus, Earth, Mars, Jupiter, Saturn, Uranus, Neptune.",
        ),
        (("What are the four seasons?", "List the seasons."), "Spring, summer, autumn, winter."),
        (("What is the largest planet?", "Which planet is the largest?"), "Jupiter is the largest planet."),
        (("What is the largest ocean?", "Which ocean is the largest?"), "The Pacific is the largest ocean."),
        (("What is the highest mountain?", "Which mountain is the highest?"), "Mount Everest is the highest mountain."),
        (("What do bees make?",), "Bees make honey."),
        (("What is water made of?",), "Water is made of hydrogen and oxygen."),
        (("What is ice?",), "Ice is frozen water."),
        (
            ("What colours are in the rainbow?", "List the colours of the rainbow."),
            "Red, orange, yellow, green, blue, indigo, violet.",
        ),
        (("Is the earth round?", "Is the earth flat?"), "The earth is round."),
    ]
    return tuple(facts)


FACTS = _facts()
REFUSAL = (
    "I am a very small model, so I do not know that. "
    "Ask me about Baton, a small sum, or something in a text that you give me."
)
OUT_OF_SCOPE = (
    "Explain {t}.",
    "What do you think about {t}?",
    "Write an essay about {t}.",
    "Tell me about {t}.",
    "How does {t} work?",
    "Who invented {t}?",
    "Give me advice on {t}.",
    "What is the history of {t}?",
    "Write code for {t}.",
    "Why is {t} important?",
    "Summarise {t} for me.",
    "Teach me {t}.",
    "Compare {t} with something else.",
    "Help me with {t}.",
)
_TOPICS = """
quantum physics, the French Revolution, machine learning, Python programming, the stock market, football,
cooking, a sorting algorithm, climate change, the Roman Empire, a web server, Shakespeare, chess openings,
black holes, modern art, the economy, linear algebra, medicine, politics, philosophy, the brain, electric cars,
photosynthesis, the internet, a database, space travel, jazz, gardening, marketing, law, taxes, evolution,
volcanoes, dinosaurs, the piano, a compiler, cryptography, blockchain, the moon landing, wine, neural networks,
a GPU, JavaScript, Linux, mathematics, gravity, relativity, vaccines, democracy, poetry, a business plan,
my homework, job interviews, healthy food, sleep, travel in Asia, a marathon, yoga, photography, film, opera,
the Second World War, robots, elections
"""
TOPICS = tuple(_items(_TOPICS, ","))
