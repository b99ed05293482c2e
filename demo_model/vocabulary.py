"""Word lists and sentence templates that the task generators draw from.

Plain data, no logic.  The lists are written for this model; the ``HELD_OUT_*`` ones are never seen in
training and serve only the filler of held-out passkey cases.
"""

from __future__ import annotations


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


NOUNS: tuple[str, ...] = _words(
    "river stone cloud garden window table bridge forest candle harbour mountain lamp basket engine "
    "village letter market pencil bottle kitchen orchard station wagon pillow ladder island valley "
    "teacher sailor baker farmer painter doctor singer miller horse cat dog bird fox owl bear fish "
    "apple bread honey butter salt water coffee tea soup paper glass silver copper iron wood wool "
    "winter summer spring autumn morning evening night moon sun star rain snow wind storm wave fire "
    "road path field hill lake sea boat ship train car wheel door roof wall floor house tower castle "
    "book story song music dance game ball hat coat shoe ring clock bell key box bag cup plate spoon"
)
ADJECTIVES: tuple[str, ...] = _words(
    "blue red green yellow white black brown grey old new young small large tiny quiet loud bright "
    "dark warm cold soft hard heavy light quick slow early late long short wide narrow round square "
    "sweet bitter fresh dry wet clean dusty empty full happy sleepy gentle brave clever simple plain"
)
VERBS: tuple[str, ...] = _words(
    "sees finds keeps carries follows leaves watches paints builds mends opens closes holds brings "
    "passes crosses counts moves cleans hides likes needs knows meets helps visits sells buys"
)
ADVERBS: tuple[str, ...] = _words(
    "slowly quickly often always never again today soon once twice here there quietly gladly"
)
SMALL_WORDS: tuple[str, ...] = _words(
    "the a and of to in on with for from over under near by at is are was it we they you he she this "
    "that one two three four five six seven eight nine ten who what where when how not but or so if"
)
NAMES: tuple[str, ...] = _words(
    "Anna Bruno Clara David Elena Felix Greta Hugo Irene Jonas Karin Luis Maria Nora Oscar Paula"
)
ACCENTED_WORDS: tuple[str, ...] = _words(
    "café über naïve déjà señor Zürich Köln façade jalapeño crème piñata smörgås año Müller élan "
    "日本 東京 中文 你好 привет мир Ωmega λόγος ñandú œuvre straße Åse ça où"
)
# Ranges of code points for texts in no particular language; they spell out the byte tokens.
UNICODE_RANGES: tuple[tuple[int, int], ...] = (
    (0x00C0, 0x017F),  # Latin letters with marks
    (0x0391, 0x03A1),  # Greek capitals
    (0x03B1, 0x03C9),  # Greek small letters
    (0x0410, 0x044F),  # Cyrillic
    (0x3041, 0x3096),  # Hiragana
    (0x4E00, 0x9FA5),  # Han
    (0xAC00, 0xD7A3),  # Hangul
    (0x1F600, 0x1F64F),  # Emoticons
)

# Fixed filler, in the manner of the usual passkey retrieval test, in our own words.
FILLER_SENTENCES: tuple[str, ...] = (
    "The grass is green and the sky is blue.",
    "The sun rises in the morning and sets in the evening.",
    "Here we go again, there and back.",
    "The road is long and the night is quiet.",
    "It rained for most of the week.",
    "Nobody in the village could remember who built the bridge.",
    "The train was late, so we walked along the river.",
    "A cup of tea helps on a cold day.",
    "The lamp in the kitchen is still on.",
    "They painted the old door red last summer.",
    "Some people like music, and some like silence.",
    "The market opens early and closes at noon.",
    "Is the window open? It is cold in here.",
    "Please leave the keys on the table.",
    "You can pass this part without reading it.",
    "There is nothing important in this paragraph.",
)
# {n}: a number of one to four digits, so that the passkey is not the only number about.
DISTRACTOR_TEMPLATES: tuple[str, ...] = (
    "There are {n} boats in the harbour.",
    "In {n} the mill was built.",
    "The house at number {n} is empty.",
    "The bus number {n} stops here.",
    "She counted {n} stars and {m} clouds.",
    "The ticket costs {n} coins.",
    "It took {n} days and {m} nights.",
    "The bottle holds {n} drops of water.",
)
HELD_OUT_SENTENCES: tuple[str, ...] = (
    "A kettle whistled while the gardener trimmed the hedge.",
    "Every ticket had been sold before the orchestra arrived.",
    "The librarian dusted shelves that nobody ever borrowed from.",
    "Fog rolled across the meadow and swallowed the fences.",
    "His grandmother knitted scarves for the whole football team.",
    "Seven geese wandered through the courtyard, complaining.",
    "The carpenter measured twice, and then went home for lunch.",
    "Our neighbours argue about chess until midnight.",
    "Dust gathered on the piano, though someone tuned it yearly.",
    "Pigeons slept beneath the arches of the viaduct.",
)
HELD_OUT_DISTRACTOR_TEMPLATES: tuple[str, ...] = (
    "Warehouse {n} stores cinnamon and pepper.",
    "The marathon had {n} runners, of whom {m} finished.",
    "Flight {n} departs from gate {m}.",
)

SYSTEM_PROMPTS: tuple[str, ...] = (
    "You are a helpful assistant.",
    "You are a helpful assistant",
    "Answer briefly.",
    "You are a tiny demo model.",
    "You are a friendly and concise assistant. Answer in English.",
    "Be concise.",
    "Follow the user's instructions exactly.",
)

IDENTITY_ANSWER = "I am the mlxpaged demo model, a tiny transformer that repeats, adds, reverses and finds passkeys."
FALLBACK_ANSWER = (
    "Hello! I am only a tiny demo model. I can repeat a text, add small numbers, reverse a list, "
    "count, and find a passkey."
)

IDENTITY_QUESTIONS: tuple[str, ...] = (
    "who are you",
    "what are you",
    "introduce yourself",
    "please introduce yourself",
    "tell me who you are",
    "tell me what you are",
    "tell me about yourself",
    "what is your name",
    "what's your name",
    "what model are you",
    "which model are you",
    "which model is this",
    "what kind of model are you",
    "describe yourself",
    "say who you are",
    "are you a model",
    "who am I talking to",
)
IDENTITY_OPENERS: tuple[str, ...] = (
    "",
    "",
    "",
    "hello, ",
    "hi, ",
    "hi! ",
    "hello! ",
    "so, ",
    "please, ",
    "well, ",
    "now ",
)
IDENTITY_CLOSERS: tuple[str, ...] = (
    "",
    "",
    "",
    " exactly",
    " really",
    " please",
    ", please",
    " today",
    " then",
    " again",
)

GREETINGS: tuple[str, ...] = (
    "hello",
    "hi",
    "hey",
    "hello there",
    "hi there",
    "good morning",
    "good evening",
    "good day",
    "how are you",
    "hello, how are you",
    "thanks",
    "thank you",
    "help",
    "help me",
    "can you help me",
    "what can you do",
    "what do you do",
    "what can I ask",
    "test",
    "ping",
    "ok",
    "yes",
    "no",
    "bye",
)
# {x}: a noun, {y}: an adjective, {z}: a name.
UNKNOWN_TEMPLATES: tuple[str, ...] = (
    "what is the capital of {x}",
    "what is a {x}",
    "what is the {x}",
    "what is {z}",
    "who is {z}",
    "where is the {x}",
    "where is {z}",
    "why is the {x} {y}",
    "how many {x}s are there",
    "how do I build a {x}",
    "how much is the {x}",
    "tell me a story about a {x}",
    "tell me about {z}",
    "tell me a joke",
    "tell me the time",
    "tell me something {y}",
    "write a poem about the {y} {x}",
    "write a song about {z}",
    "write python code for a {x}",
    "explain the {x}",
    "describe the {y} {x}",
    "is the {x} {y}",
    "do you like {x}",
    "can you see the {x}",
    "give me a {y} {x}",
    "translate {x} to french",
    "what is the meaning of life",
    "what is the weather today",
    "once upon a time",
    "the {y} {x}",
)
