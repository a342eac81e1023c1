"""Lists the words that generated worlds are made of; each is a single token of the tokenizer.

Called by `worlds`, which draws entities and values from these lists, and by `tokenizer`,
which reserves a token for each word.
"""

from __future__ import annotations

import random
import zlib


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


WOMEN = _words(
    "Mira Anna Maria Alice Clara Elena Nora Julia Sofia Emma Lena Ines Greta Hanna Ida Petra Vera "
    "Rosa Lucia Marta Sara Laura Helen Mary Jane Ruth Olga Irina Tessa Wanda Yara Zoe Bella Carla "
    "Dora Edith Freya Gina Hilda Iris Judith Karin Linda Monica Naomi Olivia Paula Rachel Selma "
    "Tanya Ursula Viola Amara Priya Mei Aisha Fatima Leila Noor Keiko"
)

MEN = _words(
    "Anton Boris Carl David Emil Felix Georg Hugo Ivan Jonas Karl Leo Max Nils Oscar Paul Ralph "
    "Simon Tom Viktor Walter Adam Ben Chris Daniel Erik Frank Gavin Henry Isaac James John Kevin "
    "Lucas Martin Nathan Oliver Peter Quentin Robert Samuel Thomas Uwe Vincent William Bob Jack "
    "Omar Hassan Ravi Arjun Kenji Hiro Diego Pablo Marco Luca Andrei Pavel Tariq"
)

SURNAMES = _words(
    "Holt Berg Stone Marsh Keller Novak Lind Dahl Voss Brandt Adler Becker Conrad Decker Ebner Falk"
    " Gruber Haas Jansen Kraus Lange Moser Nagel Ortiz Pohl Quist Ritter Sauer Thorn Ulrich Vogel"
    " Weiss Ziegler Archer Barlow Carver Dalton Ellis Foster Garner Hayes Irving Jensen Kemp Lawson"
    " Mercer Norris Osborn Parker Quinn Reeves Sutton Turner Underhill Vance Walsh Reyes Yates"
    " Abbott Bishop Cooper Dixon Everett Fletcher Graves Hunter Ingram Jarvis Kendall Lowell Madsen"
    " Nolan Oakley Pratt Ramsey Sawyer Talbot Usher Vernon Whitaker Zeller Alvarez Bianchi Costa"
    " Duarte Esposito Ferrari Gomez Herrera Ivanov Jokic Kowalski Lopez Moretti Nunez Okafor Petrov"
    " Rossi Silva Tanaka Umar Vargas Wong Yamada Zhang Chen Kumar Singh Patel Sato Kim Nguyen Ali"
    " Haddad Johnson Smith Miller Brown Davis Wilson Taylor"
)

CITIES = _words(
    "Varna Lisbon Paris London Berlin Madrid Rome Vienna Prague Warsaw Oslo Bergen Turku Riga "
    "Tallinn Vilnius Dublin Cork Leeds Bristol Porto Seville Bilbao Lyon Nantes Lille Ghent "
    "Bruges Utrecht Leiden Basel Bern Geneva Turin Genoa Milan Naples Bari Trieste Zagreb Split "
    "Belgrade Sofiyka Plovdiv Athens Patras Izmir Ankara Cairo Tunis Rabat Dakar Accra Lagos "
    "Nairobi Delhi Mumbai Kyoto Osaka Tokyo Seoul Busan Hanoi Manila Jakarta Perth Sydney "
    "Auckland Lima Quito Bogota Caracas Havana Boston Chicago Denver Dallas Austin Seattle "
    "Portland Toronto Montreal Halifax Ottawa Calgary Kelmar Dorvik Sentry Albrook Thornby "
    "Westmere Eastvale Northwick Harlow Redford Millbrook Ashford Granton Pellmore Vastergard "
    "Orlan Tesmar Kiruna Luxel Morwen Bexhill Corvane Dunmore Elstow Farholm Gildern"
)

RIVERS = _words(
    "Sorn Danube Rhine Elbe Oder Vltava Drava Sava Tisza Neva Volga Don Dvina Loire Rhone Seine"
    " Garonne Ebro Tagus Douro Tiber Arno Adige Thames Severn Trent Tyne Tweed Clyde Shannon Tamar"
    " Nile Niger Congo Zambezi Ganges Indus Mekong Yangtze Amur Ob Kolyma Irtysh Ohio Hudson"
    " Orinoco Parana Murray Waikato Yukon"
)

COMPANIES = _words(
    "Norvex Altrion Belcor Cantos Deltrix Emberly Fenwick Gralto Helvar Inovar Jastrom Kelvane "
    "Lumora Mavrik Nexon Orbita Pelaris Quantis Rovena Solvay Tremont Ultera Vandor Wexler Xantor "
    "Yorvik Zentra Avalon Borealis Cirrus Dynacor Everlast Fortuna Galaxis Horizon Ironwood"
)

JOBS = _words(
    "baker carpenter teacher nurse pilot farmer sailor lawyer doctor painter writer tailor miner "
    "judge cook dentist plumber potter weaver singer dancer actor banker barber butcher chemist "
    "clerk diver editor engineer fisherman gardener glazier historian jeweller librarian mechanic "
    "miller optician pharmacist photographer printer saddler sculptor surgeon surveyor translator "
    "waiter welder architect"
)

FOODS = _words(
    "soup bread cheese rice pasta pizza fish beans lentils eggs salad stew curry noodles dumplings "
    "pancakes waffles porridge honey yogurt apples pears plums cherries grapes figs dates melons "
    "oranges lemons olives mushrooms carrots potatoes cabbage spinach pumpkin walnuts almonds "
    "chocolate biscuits cake pie pudding ham sausages oysters shrimp trout salmon"
)

ANIMALS = _words(
    "dog cat horse parrot rabbit hamster goat sheep duck goose hen turtle lizard snake ferret "
    "donkey pony pig cow llama canary falcon owl raven pigeon hedgehog squirrel fox otter frog "
    "spider beetle crab goldfish camel peacock swan crow gecko mouse"
)

INSTRUMENTS = _words(
    "cello violin piano flute harp guitar drum trumpet organ oboe clarinet viola lute banjo "
    "bassoon trombone tuba fiddle accordion harmonica mandolin saxophone zither bagpipe ukulele "
    "xylophone horn whistle sitar cornet"
)

FIELDS = _words(
    "law history physics chemistry biology botany geology medicine music poetry logic algebra "
    "geometry astronomy geography economics philosophy grammar rhetoric theology zoology "
    "archaeology anatomy optics mechanics statistics linguistics ecology genetics acoustics"
)

COLOURS = _words(
    "red blue green yellow purple orange white black brown grey pink violet silver gold crimson"
    " turquoise"
)

PRODUCTS = _words(
    "glass paper silk wool salt steel copper amber lace clocks boats bells carpets candles pottery "
    "wine beer perfume leather bricks tiles knives buttons lamps mirrors ropes toys umbrellas "
    "violins wagons bicycles tractors cameras radios pens hats gloves shoes engines batteries"
)

AGES = tuple(str(age) for age in range(18, 91))

WORLD_WORDS = sorted(
    {
        *WOMEN,
        *MEN,
        *SURNAMES,
        *CITIES,
        *RIVERS,
        *COMPANIES,
        *JOBS,
        *FOODS,
        *ANIMALS,
        *INSTRUMENTS,
        *FIELDS,
    }
    | {*COLOURS, *PRODUCTS, *AGES}
)
"""Words that need a token both with a leading space and without one, at the start of a line or an
answer."""

LABELS = _words("Answer Result Found Reply Value Entry Fact Note Output Word")

RARER_LABELS = _words(
    "Solution Response Statement Detail Item Record Line Point Key Finding Data Info Text Field"
    " Content Match Hit Choice Verdict Report Message Summary Claim Mark Label Slot Cell Row Column"
    " Name Term Thing Object Title Topic Heading Index Source Target Return Final Given Known"
    " Listed Stated Written Said Sure True Yes Here Then So Thus"
)

_ONSETS = _words("b br c d dr f g gr h j k kl l m n p pr r s sk st t tr v w z")
_VOWELS = _words("a e i o u ai ea io")
_CODAS = ("", *_words("l n r s t x nd lm rk st"))


def invented_name(rng: random.Random) -> str:
    """Make a capitalised name of two or three random syllables, usually several tokens long."""
    syllables = [
        rng.choice(_ONSETS) + rng.choice(_VOWELS) + rng.choice(_CODAS)
        for _ in range(rng.choice((2, 2, 3)))
    ]
    return "".join(syllables).capitalize()


def is_held_out(text: str) -> bool:
    """Return whether a full name (or a format, or a paragraph) is kept out of training, by its
    checksum: one in ten."""
    return zlib.crc32(text.encode()) % 10 == 0
