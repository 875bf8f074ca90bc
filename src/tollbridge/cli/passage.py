"""A passage long enough to be worth a toll: about 700 tokens for the default model."""

from __future__ import annotations

OPENINGS = {
    "split": "Two ledgers lie open on the keeper's table, and this is what the first one says.",
    "local": "A traveller who had no coin for the bridge told this story while he waited at the ford.",
}

PASSAGE = """
The town of Harrow stands on two banks of one river. On the north bank are the mills, where grain is ground; on
the south bank are the ovens, where bread is baked. For as long as anyone remembers, each miller baked and each
baker milled, because carrying flour over the river was slow, and a family that did both jobs under one roof
needed to carry nothing.

It was a poor arrangement all the same. Whenever a large sack came to be ground, the baker had to leave his
ovens, and the loaves that were rising fell, and the people who stood in line for their daily bread waited
without knowing why. A small order behind a large one waited as long as the large one did. The bakers grew quick
at grinding in small portions, a handful of grain between two loaves, and this helped the people in the line a
little, but the large sacks took longer.

Then a bridge was built. It was no grand bridge of stone such as the capital has, over which six carts pass side
by side. It was a wooden one, wide enough for a single cart, and its keeper asked a toll by weight. Those who
had seen the capital laughed at it. A bridge so narrow, they said, is good for letters and chickens; flour will
always be ground where it is baked.

The keeper did not argue. She bought a ledger, and for a year she wrote down everything that crossed: how heavy
the cart was, how long the crossing took, how many waited before it, and how wet the planks were. She wrote down
what she heard from the two banks, too: how long the mills took for a sack of a given size, and how many loaves
spoiled when a baker left his ovens. At the end of the year she could tell any traveller, before he paid, when
his flour would arrive.

What she found surprised both sides. For a small sack, the toll and the wait at the gate were more than the
whole work of grinding it beside the oven; such sacks, she told the bakers, should stay where they are. For a
large sack on a quiet day, the mill could send the first flour across while it was still grinding the rest, so
that almost all of the journey was hidden behind the grinding, and the ovens never stopped. For a large sack on
a busy day, when carts stood in a row before the bridge, it depended on the row. There was no weight above which
one should always cross, and no weight below which one never should, though the clerks of the capital had
published such a number and were proud of it.

So she did what the clerks had not. For every sack she asked how heavy it was, how much of it the baker already
had in his bin from the day before, how long the row was, and how many loaves were rising on the other side. She
added up what each choice would cost the owner of the sack, and what it would cost everybody else, and she named
the cheaper one. She wrote the reason beside it, in a hand that anyone could read, and in the evening she wrote
beside the reason what had really happened. When she had been wrong she did not cross it out. She measured the
planks again.

In the third year the mayor asked her whether the town should save for a bridge of stone. She opened the ledger
and showed him the days on which the wooden one had been enough, and the days on which it had not, and what each
of those had cost. It was, she said, his decision. But it need not be a guess.
"""

QUESTION = "In two or three sentences: what did the keeper of the bridge do differently from the clerks of the capital?"


def prompt(opening: str) -> str:
    """Return the passage with the opening sentence of that name, and a question about it."""
    return f"{OPENINGS[opening]}\n{PASSAGE}\n{QUESTION}"
