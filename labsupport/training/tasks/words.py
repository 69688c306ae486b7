"""The words of the generated texts: data only. A change here changes every generated text."""

# Names of three letters: consonant, vowel, consonant. No filler word begins with a capital.
FIRST = "BCDFGHJKLMNPRSTVWXYZ"
VOWELS = "aeiou"
LAST = "bcdfghjklmnprstvwxyz"

PLACES = ("north hall", "back stairs", "main gate", "long shed", "old ferry", "side door")
PEOPLE = ("porter", "clerk", "guard", "driver", "student", "cook", "painter", "visitor")
MOODS = ("tired", "quiet", "young", "cheerful", "careful", "busy", "polite", "sleepy")
DEEDS = ("carries", "counts", "washes", "paints", "forgets", "repairs", "weighs", "sorts")
GOODS = ("wet coats", "tin cups", "small parcels", "long ropes", "paper flags", "oil lamps")

# To fill a gap of any length there must be words of one, two and three letters.
SHORT = (
    *("a", "o", "we", "of", "in", "and", "the", "wet", "rain", "wind", "door", "again", "steps"),
    *("water", "voices", "behind", "window", "whistle", "thunder", "somebody"),
)

# Dialogue. All names have four letters: who speaks does not change the length of a line.
SPEAKERS = ("Mara", "Otto", "Nina", "Hugo", "Lena", "Emil", "Rosa", "Finn", "Ines", "Karl")
SCENES = ("a small theatre", "a harbour office", "a village museum", "a railway depot")
COLOURS = (
    *("red", "blue", "green", "white", "black", "brown", "grey", "pink"),
    *("gold", "silver", "yellow", "orange", "purple", "wooden", "iron", "glass"),
)
THINGS = (
    *("box", "bag", "drum", "lamp", "mask", "coat", "chair", "crate"),
    *("flag", "clock", "trunk", "vase", "ladder", "mirror", "basket", "bottle"),
    *("carpet", "helmet", "kettle", "violin", "curtain", "globe", "sword", "wheel"),
    *("candle", "statue", "radio", "bench", "barrel", "bucket", "saddle", "trumpet"),
)
# What somebody answers to {last}, who spoke before; and what may follow.
REPLIES = (
    "thank you, {last}, I wrote that down",
    "{last}, you spoke too fast for me",
    "I hear you, {last}",
    "if you say so, {last}",
    "I will tell the others, {last}",
    "are you sure of that, {last}",
    "good, {last}, then we can go on",
    "{last}, you said so yesterday too",
)
REMARKS = (
    "somebody must sweep the floor",
    "the doors stay shut until tonight",
    "it is cold in here",
    "my hands are full of paint",
    "we have a lot to carry",
    "the guests come when it is dark",
    "let us not lose the list",
    "I could do with a cup of tea",
)
NOON = "(Noon. They share bread and soup, and go on.)\n"
EVENING = "(Evening. The lamps are lit.)\n"
