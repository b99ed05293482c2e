"""A labelled set for decisions, written for this repository: 208 items of four tasks, one of which is asked in two
ways.

The items are plain enough that a model of 135 million parameters does better than chance. Each task is one question, in
OpenAI's form, and texts with the index of the right option, in the order of the question's options.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Task:
    """question: of OpenAI's dialect, without a name. items: a text, and the index of its right option. A predicate has
    two, and true is the second."""

    name: str
    question: dict[str, Any]
    items: tuple[tuple[str, int], ...]


def labelled(*groups: tuple[str, ...]) -> tuple[tuple[str, int], ...]:
    """The texts of each option, mixed: the first of each option, then the second of each, and so on."""
    longest = max(map(len, groups))
    return tuple(
        (group[number], label) for number in range(longest) for label, group in enumerate(groups) if number < len(group)
    )


def choice(instructions: str, *values: str) -> dict[str, Any]:
    return {"type": "choice", "instructions": instructions, "choices": [{"value": value} for value in values]}


NEGATIVE = (
    "The soup was cold and the waiter was rude to us.",
    "I want my money back. This blender broke after two days.",
    "The film was boring, and I left before the end.",
    "Terrible battery. It dies before lunch every single day.",
    "The room smelled of smoke and the sheets were dirty.",
    "Nobody answered my calls, and the package never arrived.",
    "The shoes hurt and the colour washed out in the rain.",
    "A waste of time. The course taught me nothing new.",
    "The app crashes whenever I open a photo.",
    "We waited two hours and then they cancelled the tour.",
    "The bread was stale and the coffee tasted burnt.",
    "Awful noise all night, I could not sleep at all.",
    "The instructions are wrong and half of the screws are missing.",
    "I regret buying this phone. It is slow and gets hot.",
    "The driver was late and drove badly.",
    "The plot makes no sense and the actors are dreadful.",
    "My order was wrong again, and they refused to fix it.",
    "The headphones hiss and the left side is dead.",
    "Very disappointing. The photos looked much better than the flat.",
    "The pasta was overcooked and far too salty.",
    "This jacket fell apart in the first week.",
    "The staff ignored us and the table was sticky.",
    "I hate the new update, everything takes longer now.",
    "The museum was closed although the website said it was open.",
    "The paint peels off and the wood is cracked.",
    "Worst haircut of my life. I cried when I got home.",
)
POSITIVE = (
    "The soup was delicious and the waiter was very kind.",
    "I love this blender. It is quiet and easy to clean.",
    "A wonderful film, I laughed from start to end.",
    "Great battery. It lasts three days without charging.",
    "The room was bright and clean, with a lovely view.",
    "They answered at once, and the package came a day early.",
    "The shoes are comfortable and look beautiful.",
    "An excellent course. I learned more than I had hoped.",
    "The app is fast and a joy to use.",
    "The tour was amazing, our guide knew everything.",
    "Fresh bread, perfect coffee, friendly people.",
    "So quiet at night that I slept like a baby.",
    "Clear instructions, and it was built in ten minutes.",
    "I am very happy with this phone. The camera is superb.",
    "The driver was on time, polite and careful.",
    "A clever plot and brilliant actors.",
    "They got my order right and added a free dessert.",
    "The headphones sound fantastic and feel light.",
    "The flat is even nicer than in the photos.",
    "The pasta was perfect, the best I ever had.",
    "This jacket is warm and still looks like new.",
    "The staff welcomed us with a smile and a drink.",
    "I love the new update, everything is quicker now.",
    "The museum was fascinating and the children adored it.",
    "Beautiful wood and a flawless finish.",
    "The best haircut of my life. I feel great.",
)

SPORT = (
    "The striker scored twice in the final minutes of the match.",
    "She won the marathon in a new record time.",
    "The goalkeeper saved a penalty and the crowd cheered.",
    "Our tennis coach changed my backhand.",
    "The team lost the basketball game by one point.",
    "He trains for the swimming championship every morning.",
    "The referee showed a red card after the foul.",
    "The cyclists climbed the mountain in heavy rain.",
    "The boxer won by a knockout in the third round.",
    "The hockey season begins next week.",
    "The golfer missed a short putt on the last hole.",
    "The gymnast landed her jump and won gold.",
    "The coach praised the defence after the game.",
)
FOOD = (
    "Chop the onions and fry them in butter until golden.",
    "This restaurant serves fresh noodles and dumplings.",
    "Add two eggs and a cup of flour to the batter.",
    "The cake needs forty minutes in the oven.",
    "Ripe tomatoes make the best sauce for pasta.",
    "She baked bread with seeds and honey.",
    "The chef grilled the fish with lemon and garlic.",
    "We had pancakes and fruit for breakfast.",
    "Let the dough rest before you roll it out.",
    "The curry was spicy, so we ordered more rice.",
    "Roast the potatoes with salt and rosemary.",
    "My grandmother's soup has carrots and beans.",
    "Melt the chocolate and stir in the cream.",
)
COMPUTERS = (
    "The new laptop has a faster processor and more memory.",
    "Restart the server after you install the update.",
    "The programmer fixed a bug in the database.",
    "Her phone lost all apps after the software update.",
    "The website was offline because of a network failure.",
    "You need a strong password for your email account.",
    "The code compiles, but the tests fail.",
    "A virus encrypted all files on the hard disk.",
    "He plugged the keyboard into the computer.",
    "The company writes software for robots.",
    "Click on the icon to open the program.",
    "The browser keeps asking to save my login.",
    "They moved their data to the cloud.",
)
WEATHER = (
    "Heavy snow is expected in the mountains tonight.",
    "It will be sunny with a light wind in the afternoon.",
    "A storm with thunder and lightning comes from the west.",
    "The temperature drops below zero after midnight.",
    "Fog covered the valley until noon.",
    "Rain all week, with floods near the river.",
    "The heat wave continues, it will reach forty degrees.",
    "Dark clouds gather, and hail is possible.",
    "A warm breeze and clear skies tomorrow.",
    "The hurricane will reach the coast on Friday.",
    "Ice on the roads after a freezing night.",
    "Humid air and showers in the evening.",
    "The drought ended with three days of rain.",
)

ENGLISH = (
    "Where did you leave the keys to the house?",
    "The children are playing in the garden.",
    "We will meet at the station tomorrow.",
    "I have never seen such a big dog.",
    "My brother works in a small office.",
    "The train was late again this morning.",
    "Could you please open the window?",
    "She reads a book every week.",
    "They bought a new car last year.",
    "It is too late to call him now.",
    "Our neighbours have three cats.",
    "The water in the lake is cold.",
    "I forgot my umbrella at home.",
)
FRENCH = (
    "Où as-tu laissé les clés de la maison ?",
    "Les enfants jouent dans le jardin.",
    "Nous nous verrons demain à la gare.",
    "Je n'ai jamais vu un chien aussi grand.",
    "Mon frère travaille dans un petit bureau.",
    "Le train était encore en retard ce matin.",
    "Pourriez-vous ouvrir la fenêtre, s'il vous plaît ?",
    "Elle lit un livre chaque semaine.",
    "Ils ont acheté une nouvelle voiture l'an dernier.",
    "Il est trop tard pour l'appeler maintenant.",
    "Nos voisins ont trois chats.",
    "L'eau du lac est froide.",
    "J'ai oublié mon parapluie chez moi.",
)
GERMAN = (
    "Wo hast du die Schlüssel für das Haus gelassen?",
    "Die Kinder spielen im Garten.",
    "Wir treffen uns morgen am Bahnhof.",
    "Ich habe noch nie einen so großen Hund gesehen.",
    "Mein Bruder arbeitet in einem kleinen Büro.",
    "Der Zug war heute Morgen wieder zu spät.",
    "Könnten Sie bitte das Fenster öffnen?",
    "Sie liest jede Woche ein Buch.",
    "Sie haben letztes Jahr ein neues Auto gekauft.",
    "Es ist zu spät, um ihn jetzt anzurufen.",
    "Unsere Nachbarn haben drei Katzen.",
    "Das Wasser im See ist kalt.",
    "Ich habe meinen Regenschirm zu Hause vergessen.",
)
SPANISH = (
    "¿Dónde dejaste las llaves de la casa?",
    "Los niños juegan en el jardín.",
    "Nos vemos mañana en la estación.",
    "Nunca he visto un perro tan grande.",
    "Mi hermano trabaja en una oficina pequeña.",
    "El tren llegó tarde otra vez esta mañana.",
    "¿Podría abrir la ventana, por favor?",
    "Ella lee un libro cada semana.",
    "Compraron un coche nuevo el año pasado.",
    "Es demasiado tarde para llamarlo ahora.",
    "Nuestros vecinos tienen tres gatos.",
    "El agua del lago está fría.",
    "Olvidé mi paraguas en casa.",
)

AWFUL = (
    "Disgusting. We were all sick afterwards, never again.",
    "The worst hotel I have ever stayed in. Dirty, loud, rude.",
    "Complete garbage. It broke at once and they kept my money.",
    "Horrible service, horrible food, horrible evening.",
    "Absolutely terrible, I want to warn everybody.",
    "A disaster from start to finish. Zero stars.",
    "Dangerous and useless. It caught fire.",
    "I have never been so angry in a shop.",
    "Rotten fruit, broken eggs, and nobody cared.",
    "The most awful concert of my life, everybody left.",
    "It ruined our wedding. Unforgivable.",
    "A scam. Stay away from these people.",
    "Filthy rooms with insects in the bed.",
)
POOR = (
    "Not good. The food was bland and we waited too long.",
    "The room was small and rather dirty. I expected more.",
    "It works sometimes, but it is slow and feels cheap.",
    "Disappointing service, though the waiter said sorry.",
    "Below average. I would not come back.",
    "The sound is weak and the cable is too short.",
    "The film has a few nice pictures and a dull story.",
    "Too expensive for what you get.",
    "The shirt is thin and does not fit well.",
    "The tour was short and a bit boring.",
    "The soup was lukewarm and the bread was dry.",
    "The app has many bugs, I often have to restart it.",
    "The bed was hard and the shower did not get warm.",
)
GOOD = (
    "Good food and friendly service, I would come back.",
    "A nice, clean room. Only the street was a little loud.",
    "It works well and looks good.",
    "The waiter was helpful and the meal was tasty.",
    "Better than I had expected, a pleasant evening.",
    "The sound is clear and it is easy to use.",
    "A good film with a few slow scenes.",
    "A fair price and solid quality.",
    "The shirt fits well and feels soft.",
    "The tour was interesting and well organised.",
    "The soup was hot and the bread was fresh.",
    "The app is useful, and it rarely fails.",
    "The bed was comfortable and the breakfast was good.",
)
PERFECT = (
    "The best meal of my life. Perfect in every way!",
    "A dream of a hotel. Spotless, quiet, and wonderful people.",
    "Brilliant! I have never owned anything so good.",
    "Outstanding service, superb food, a magical evening.",
    "Absolutely perfect, I recommend it to everybody.",
    "Amazing from start to finish. Ten stars.",
    "A masterpiece. I was moved to tears.",
    "Incredible quality, it exceeds every hope.",
    "The finest fruit and the kindest people, simply perfect.",
    "The greatest concert I have ever seen, we danced all night.",
    "It made our wedding unforgettable. Thank you so much!",
    "Flawless. I would pay twice the price.",
    "Paradise. We never wanted to leave.",
)

SENTIMENT = labelled(NEGATIVE, POSITIVE)

TASKS = (
    Task("sentiment (choice of 2)", choice("What is the sentiment?", "negative", "positive"), SENTIMENT),
    Task("sentiment (predicate)", {"type": "predicate", "instructions": "Is the text positive?"}, SENTIMENT),
    Task(
        "topic (choice of 4)",
        choice("What is the text about?", "sport", "food", "computers", "weather"),
        labelled(SPORT, FOOD, COMPUTERS, WEATHER),
    ),
    Task(
        "language (choice of 4)",
        choice("In which language is the text?", "English", "French", "German", "Spanish"),
        labelled(ENGLISH, FRENCH, GERMAN, SPANISH),
    ),
    Task(
        "rating (score of 4)",
        {
            "type": "score",
            "instructions": "How did they like it?",
            "levels": [{"label": label} for label in ("terrible", "bad", "good", "excellent")],
        },
        labelled(AWFUL, POOR, GOOD, PERFECT),
    ),
)
