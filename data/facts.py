"""Facts that a training text tells once and asks for much later, so that a retrofit learns to keep what is said once.

- `with_facts`: ids of a text with facts in it, each a sentence, and later a question with its answer or the same again;
- `FactRows`: rows of text (data/text.py), a share of them with facts.
Manuals and code seldom ask for what they said a thousand tokens ago, so a scorer that learns from them alone loses it.
Names, words and sentences are none of those with which recall is measured (`needle_prompt` in data/text.py).

Letters: T tokens of a row.
"""
import math
import random
import re
from dataclasses import dataclass

import torch

from data.teacher import checksum
from data.text import at_line_end

NEAR = 100  # fewest tokens of text between what is told and what is asked; less where a row is short
TIMES_ASKED = (0, 1, 2), (2, 6, 2)  # and their weights: what is never asked for is not worth keeping

WORDS = dict(
    first="Abena Aldo Amira Anselm Beatriz Bogdan Carmen Cedric Dalia Dmitri Edith Emeka Fatima Florian Greta Hamid "
          "Helga Ingrid Isaac Jasmin Jorge Kaito Karin Leila Lorenzo Malik Marta Nadia Niels Olga Omar Paloma Priya "
          "Quentin Rafael Rosa Samir Sonja Tariq Ulrike Viktor Wanda Xenia Yusuf Zofia".split(),
    last="Abadi Almeida Bakker Bergstrom Castellano Chaudhry Dufour Eriksen Falk Ferreira Gallagher Haddad Halvorsen "
         "Ibrahim Janssen Kaminski Kowalczyk Lindqvist Lombardi Marchetti Mbeki Moreau Nakamura Novak Okafor Olsen "
         "Petrov Quiroga Rahman Rossi Sandoval Schreiber Takeda Thorne Ueda Vasquez Virtanen Wexler Yamada "
         "Zielinski".split(),
    place="Aalborg Amersfoort Bergamo Braga Cartagena Chania Debrecen Dunkirk Esbjerg Evora Fukuoka Galway Graz Haifa "
          "Hobart Inverness Izmir Jaipur Kaunas Kumasi Leiden Lugano Malmo Mombasa Nantes Nukualofa Oaxaca Ostrava "
          "Pamplona Poznan Quito Rijeka Salta Tampere Trieste Ushuaia Varna Wellington Yerevan Zadar".split(),
    topic="accounting archive audit budget cleaning contract design energy exhibition export festival harvest housing "
          "hygiene insurance inventory lecture licensing logistics maintenance migration payroll planning recruitment "
          "safety sampling security shipping staffing survey training translation transport travel".split(),
    item="almonds apricots batteries bolts buttons cables carpets chisels cushions envelopes filters gaskets gloves "
         "helmets hinges labels lentils magnets notebooks olives pencils pulleys ropes saddles screws sensors spoons "
         "stamps towels tripods umbrellas valves violins washers zippers".split(),
    company="Altmark Brightwell Corvane Delphine Eastmoor Fennimore Gravelle Hartwick Ironside Juniper Kestrel "
            "Lakeshore Meridian Northgate Oakhurst Pinnacle Quarry Ridgeway Sterling Tidewater Umbra Vantage Westbrook "
            "Yarrow Zenith".split(),
    trade="Bakery Books Chemicals Electric Foods Freight Glass Instruments Labs Logistics Media Motors Optics Paper "
          "Partners Printing Seeds Shipping Software Steel Textiles Tools".split(),
    verb="batch cache commit copy fetch flush merge parse poll probe read retry scan send sync trim upload "
         "write".split(),
    what="block buffer count delay depth entry frame interval limit node offset page queue rate record size span "
         "timeout".split(),
    host="apollo borealis cygnus draco electra gemini hydra icarus juno lyra mizar orion pegasus rigel sirius "
         "talos vega zephyr".split(),
    title="Autumn Distant Endless Forgotten Gentle Hidden Hollow Last Lonely Northern Patient Quiet Restless Second "
          "Silent Sleeping Stubborn Vanishing Wandering Winter".split(),
    noun="Apprentice Cartographer Clockmaker Daughter Ferryman Glazier Island Journey Kingdom Library Machine Marsh "
         "Morning Neighbour Ocean Passenger River Shepherd Stranger Valley Village Weaver".split())
MONTHS = ("January February March April May June July August September October November December").split()
LETTERS = "ABCDEFGHJKLMNPQRSTUVWXYZ"


def digits(rng):
    """2 to 8 of them, each length as likely."""
    n = rng.randint(2, 8)
    return str(rng.randrange(10**(n - 1), 10**n))


def letters(rng, n):
    return "".join(rng.choices(LETTERS, k=n))


DRAWN = {name: lambda rng, words=words: rng.choice(words) for name, words in WORDS.items()} | dict(
    person=lambda rng: f"{rng.choice(WORDS['first'])} {rng.choice(WORDS['last'])}",
    digits=digits,
    time=lambda rng: f"{rng.randrange(24):02d}:{rng.randrange(60):02d}",
    price=lambda rng: f"{rng.choice('$€£')}{rng.randrange(1, 10**rng.randint(1, 5)):,}.{rng.randrange(100):02d}",
    code=lambda rng: rng.choice((f"{letters(rng, 2)}-{rng.randrange(100, 10_000)}",
                                 f"{letters(rng, 3)}{rng.randrange(10, 1000)}{letters(rng, 1)}",
                                 "".join(rng.choices(LETTERS + "23456789", k=6)))),
    hex=lambda rng: f"{rng.randrange(16**6, 16**8):08x}",
    date=lambda rng: f"{rng.randint(1, 28)} {rng.choice(MONTHS)} {rng.randint(1900, 2039)}",
    small=lambda rng: str(rng.randint(2, 99)),
    flight=lambda rng: f"{letters(rng, 2)} {rng.randint(100, 9999)}")

# what a fact is about, its answer, how it is told, how it is asked for: there the answer comes after what it is about
FORMS = (
    ("{person}", "{digits}",
     ("{s} has locker {a}.", "Locker {a} belongs to {s}."),
     ("Which locker does {s} have? Locker {a}.", "Question: which locker is that of {s}?\nAnswer: {a}",
      "As noted before, {s} has locker {a}.")),
    ("{topic} desk in {place}", "{digits}",
     ("To reach the {s}, dial {a}.", "Dial {a} for the {s}."),
     ("How is the {s} reached? Dial {a}.", "Q: What do I dial for the {s}?\nA: {a}",
      "Once more, to reach the {s}, dial {a}.")),
    ("Mount {last}", "{digits}",
     ("{s} rises {a} feet above the plain.", "At {a} feet, the highest peak of the range is {s}."),
     ("How many feet does {s} rise? It rises {a} feet.", "The climbers on {s} went up all {a} feet of it.")),
    ("village of {last}ville", "{digits}",
     ("The {s} counts {a} inhabitants.", "There are {a} people in the {s}."),
     ("How many people live in the {s}? {a} people.", "Inhabitants of the {s}, according to the census: {a}.")),
    ("{verb}_{what}_{what}", "{digits}",
     ("The option {s} defaults to {a}.", "Unless it is set, the value of {s} is {a}.", "    {s} = {a}"),
     ("What does the option {s} default to? To {a}.", "Without a setting, {s} stays at {a}.",
      "    assert {s} == {a}")),
    ("{host}-{small}", "{digits}",
     ("The service on {s} listens on port {a}.", "Port {a} is open on {s}."),
     ("Which port is open on {s}? Port {a}.", "    connect {s}:{a}",
      "Remember that the service on {s} listens on port {a}.")),
    ("sample {code}", "{digits}",
     ("{s} weighs {a} milligrams.", "On the scale, {s} came to {a} milligrams."),
     ("How much does {s} weigh? {a} milligrams.", "Weight of {s}, from the record above: {a} milligrams.")),
    ("train to {place}", "{time}",
     ("The {s} leaves at {a}.", "At {a} the {s} departs."),
     ("When does the {s} leave? At {a}.", "Anyone who takes the {s} must be there by {a}.",
      "Q: Departure of the {s}?\nA: {a}")),
    ("{topic} meeting in {place}", "{time}",
     ("The {s} begins at {a}.", "It was agreed to start the {s} at {a}."),
     ("What time does the {s} begin? It begins at {a}.", "Reminder: the {s} begins at {a}.")),
    ("flight {flight}", "{code}",
     ("Passengers on {s} hold the booking {a}.", "The booking {a} is for {s}."),
     ("Which booking is for {s}? It is {a}.", "The desk asked about {s}, and the answer was {a}.")),
    ("box of {item} from {place}", "{price}",
     ("A {s} costs {a}.", "They ask {a} for a {s}."),
     ("How much is a {s}? It costs {a}.", "For one {s} we paid {a}, as agreed.",
      "Question: what do they ask for a {s}?\nAnswer: {a}")),
    ("invoice of {company} {trade}", "{price}",
     ("The {s} comes to {a}.", "A sum of {a} is due on the {s}."),
     ("What sum is due on the {s}? {a} is due.", "To settle the {s}, transfer {a}.")),
    ("{place} office", "{code}",
     ("The door of the {s} opens with {a}.", "Use {a} to enter the {s}."),
     ("What opens the door of the {s}? The code {a}.", "Whoever wants to enter the {s} types {a}.")),
    ("crate of {item}", "{code}",
     ("The {s} stands on shelf {a}.", "On shelf {a} there is a {s}."),
     ("Where is the {s}? On shelf {a}.", "Go and get the {s} from shelf {a}.")),
    ("{first}{small}", "{code}",
     ("The token of user {s} is {a}.", "The token {a} was issued to user {s}."),
     ("Which token was issued to user {s}? The token {a}.", "    login --as \"{s}\" --token {a}")),
    ("release {small}.{small} of {host}", "{hex}",
     ("The checksum of {s} is {a}.", "The archive with checksum {a} is {s}."),
     ("What is the checksum of {s}? {a}", "Verify that {s} has the checksum {a}.")),
    ("novel \"The {title} {noun}\"", "{person}",
     ("The {s} was written by {a}.", "{a} is the author of the {s}."),
     ("Who wrote the {s}? {a} wrote it.", "The prize for the {s} went to its author, {a}.",
      "Q: Author of the {s}?\nA: {a}")),
    ("{company} {trade}", "{person}",
     ("The director of {s} is {a}.", "{a} has been put in charge of {s}."),
     ("Who is in charge of {s}? {a} is.", "Letters to {s} are opened by its director, {a}.")),
    ("ship {noun} of {place}", "{person}",
     ("The captain of the {s} was {a}.", "{a} commanded the {s}."),
     ("Who commanded the {s}? It was {a}.", "When the {s} came in, its crew thanked their captain, {a}.")),
    ("{person}", "{place}",
     ("{s} grew up in {a}.", "The town of {a} is where {s} grew up."),
     ("Where did {s} grow up? In {a}.", "Now and then {s} still writes to old friends in {a}.",
      "Question: which town did {s} grow up in?\nAnswer: {a}")),
    ("{topic} conference of {company} {trade}", "{place}",
     ("The {s} takes place in {a}.", "They meet in {a} for the {s}."),
     ("Where does the {s} take place? In {a}.", "Those who go to the {s} should book a room in {a}.")),
    ("{person}", "{date}",
     ("{s} was born on {a}.", "On {a}, {s} was born."),
     ("When was {s} born? On {a}.", "Date of birth of {s}: {a}.")),
    ("{topic} report for {place}", "{date}",
     ("The {s} is due on {a}.", "By {a} the {s} must be handed in."),
     ("When is the {s} due? On {a}.", "Please do not forget that the {s} is due on {a}.")),
    ("{company} {trade} plant in {place}", "{date}",
     ("The {s} was opened on {a}.", "On {a} the first shift began at the {s}."),
     ("Since when has the {s} been open? Since {a}.", "Opening of the {s}, as stated above: {a}.")))


def drawn(pattern, rng):
    """The pattern with each {name} drawn anew."""
    return re.sub(r"\{(\w+)\}", lambda found: DRAWN[found[1]](rng), pattern)


@dataclass
class Fact:
    """texts: the sentence that tells it, then those that ask for it or say it again. told: the token after the first;
    asked: the first token of each of the others, in no order. Positions in the row, 0 until it has one."""
    subject: str
    answer: str
    texts: list[str]
    told: int
    asked: list[int]


def draw_fact(form, rng, times, taken=()) -> Fact | None:
    """A fact of this form that is asked for `times` times (0 to 2), with neither subject nor answer in `taken`. None
    where a hundred draws find no such, as in a row so long that it has named nearly every place."""
    subject, answer, tells, asks = form
    for _ in range(100):
        s, a = drawn(subject, rng), None
        if s not in taken and (a := drawn(answer, rng)) not in taken:
            break
    else:
        return None
    return Fact(s, a, [text.format(s=s, a=a) for text in (rng.choice(tells), *rng.sample(asks, times))], 0, [0] * times)


def encoded(fact, tokenizer):
    """Each of its texts as ids, on lines of their own."""
    return [tokenizer.encode(f"\n{text}\n") for text in fact.texts]


def with_facts(ids, tokenizer, rng):
    """ids (list of T) -> as many ids, the first of them with facts in between, and the Facts. About one for 512 tokens,
    at least one, in groups of a form, so that what is asked for has to be found by its subject. They take at most half
    of the row; one too short for its first is left as it is."""
    n = rng.randint(max(1, len(ids) // 1024), max(1, 3 * len(ids) // 1024))
    forms = rng.sample(FORMS, min(max(1, n // 3), len(FORMS)))
    facts, parts, used, taken = [], [], 0, set()
    for i in range(n):
        times = rng.choices(*TIMES_ASKED)[0] if facts else 1
        fact = draw_fact(forms[i % len(forms)], rng, times, taken)
        if fact is None:
            continue
        pieces = encoded(fact, tokenizer)
        if used + sum(map(len, pieces)) > len(ids) // 2:
            break
        used += sum(map(len, pieces))
        taken |= {fact.subject, fact.answer}
        facts.append(fact)
        parts.append(pieces)
    room = len(ids) - used
    near = min(NEAR, room // 4)
    inserts = []  # place in the text, fact, piece of it
    for i, pieces in enumerate(parts):
        told = at_line_end(tokenizer, ids, rng.randint(0, room - near), room - near)
        inserts.append((told, i, 0))
        for piece in range(1, len(pieces)):
            # one half at all scales, the other mostly far, where nothing but a scorer's choice keeps the fact
            far = room - told
            distance = rng.randint(near, far) if rng.random() < 0.5 else round(
                math.exp(rng.uniform(math.log(near), math.log(far))))
            inserts.append((at_line_end(tokenizer, ids, told + distance, room), i, piece))
    row, last = [], 0
    for place, i, piece in sorted(inserts):
        row += ids[last:place]
        last = place
        if piece:
            facts[i].asked[piece - 1] = len(row)
        row += parts[i][piece]
        if not piece:
            facts[i].told = len(row)
    return row + ids[last:room], facts


class FactRows(torch.utils.data.Dataset):
    """Row i: idx and targets, (T,) int64 each, as in rows (a TextRows); with probability `share`, with facts in it.
    What a row holds depends on (seed of rows, i) alone, also in a second epoch, whose facts are new.
    ValueError where a row is too short for a fact and its question."""

    def __init__(self, rows, share, tokenizer):
        self.rows, self.share, self.tokenizer = rows, share, tokenizer
        self.file, self.length, self.n = rows.file, rows.length, len(rows)  # n: no row comes again
        rng = random.Random("facts")
        longest = max(sum(map(len, encoded(draw_fact(form, rng, 1), tokenizer))) for form in FORMS for _ in range(64))
        if self.length < 2 * longest:
            raise ValueError(f"--facts: a fact and its question take up to {longest} tokens of this model and at most "
                             f"half of a row: give --context {2 * longest} or more, not {self.length}")

    def __len__(self):
        return len(self.rows)

    def place(self, row):
        """The number under which what depends on the content of a row is kept (teacher.py)."""
        return row

    def way(self):
        """What the rows depend on beside the text, as JSON; the sentences by the checksum of this file."""
        return {"share": self.share, "seed": self.rows.seed, "sentences": checksum(__file__)}

    def __getitem__(self, row):
        idx, targets = self.rows[row]
        rng = random.Random(f"facts {self.rows.seed} {row}")
        if rng.random() >= self.share:
            return idx, targets
        ids = torch.tensor(with_facts([*idx.tolist(), int(targets[-1])], self.tokenizer, rng)[0])
        return ids[:-1], ids[1:]
