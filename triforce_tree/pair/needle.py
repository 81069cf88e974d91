"""The planted fact of the needle test: one sentence, one question, a number of six digits.

The embedded target was trained on exactly these sentences, so a test of its memory has to use them
too. The tokenizer splits digits one by one: an answer is a blank and six digit tokens, and greedy
decoding is right when the six digits are. ``names`` are pairs of an adjective and a noun.
"""

from random import Random

ADJECTIVES = (
    "amber", "ancient", "bitter", "blue", "brave", "bright", "broken", "calm", "clever", "cold",
    "copper", "crimson", "curious", "dark", "distant", "dry", "eager", "early", "empty", "fierce",
    "frozen", "gentle", "golden", "grand", "green", "grey", "hidden", "hollow", "honest", "humble",
    "iron", "ivory", "jolly", "late", "lonely", "lucky", "marble", "mellow", "misty", "narrow",
    "noble", "orange", "pale", "patient", "proud", "purple", "quick", "quiet", "rapid", "red",
    "rusty", "scarlet", "silent", "silver", "simple", "slow", "smooth", "steady", "stormy", "sweet",
    "tall", "tiny", "violet", "wild",
)  # fmt: skip
NOUNS = (
    "anchor", "arrow", "badger", "bell", "bridge", "candle", "canyon", "castle", "cedar", "cloud",
    "comet", "crow", "desert", "dolphin", "dragon", "eagle", "falcon", "feather", "forest", "fox",
    "garden", "glacier", "hammer", "harbor", "hawk", "heron", "island", "kettle", "ladder",
    "lantern", "lion", "maple", "meadow", "mirror", "mountain", "oak", "ocean", "orchard", "otter",
    "owl", "panther", "pebble", "piano", "planet", "raven", "ribbon", "river", "rocket", "sparrow",
    "spider", "temple", "thunder", "tiger", "tower", "tunnel", "valley", "violin", "walnut",
    "whale", "willow", "window", "winter", "wizard", "wolf",
)  # fmt: skip
DIGITS = 6


def drawn(draw: Random) -> tuple[str, str]:
    """Returns a name and a number."""
    return draw.choice(names()), "".join(draw.choices("0123456789", k=DIGITS))


def names() -> list[str]:
    """All 4,096 names, in a fixed order."""
    return [f"{adjective} {noun}" for adjective in ADJECTIVES for noun in NOUNS]


def fact(name: str, number: str) -> str:
    """The sentence to plant; ``number`` has six digits."""
    return f"\n\nThe secret number of the {name} is {number}.\n\n"


def question(name: str) -> str:
    """The question to ask last; the answer follows as a blank and six digits."""
    return (
        f"\n\nQuestion: What is the secret number of the {name}?\nAnswer: The secret number of the {name} is"
    )
