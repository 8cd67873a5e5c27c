"""The program that the Python guest is warmed with: a set of imports, an index of documents held in
memory, and the handler that answers requests on it.

`handle` takes a request as JSON text and returns the answer as JSON text. Nothing here tidies up
after itself: whatever a request changes stays changed until the host resets the guest.
"""

import collections
import dataclasses
import datetime
import enum
import functools
import gc
import hashlib
import itertools
import json
import random
import re
import statistics
import textwrap
import typing

# Every object counts as a reference to its type, and RustPython on 32 bits aborts at 32,768
# references to one object: the index is small enough to leave most of them to requests.
DOCUMENTS = 2_000
WORDS = """amber anvil basket brisk calm candle drum dusky early easel flask frosty gasket grand
hammer hollow inkwell ivory jolly kettle ladder lantern mellow mitten narrow needle oaken oven
plain pulley quiet quill rustic saddle silver tallow timber urn velvet whistle""".split()


class Kind(enum.Enum):
    NOTE = "note"
    LETTER = "letter"
    REPORT = "report"


@dataclasses.dataclass
class Document:
    number: int
    kind: Kind
    day: datetime.date
    text: str
    reads: int = 0


def build() -> tuple[list[Document], dict[str, list[int]]]:
    # A fixed sequence, so that every build of the index is the same.
    source = random.Random(20260101)
    kinds = list(Kind)
    first = datetime.date(2020, 1, 1)
    documents = []
    for number in range(DOCUMENTS):
        words = source.choices(WORDS, k=12)
        day = first + datetime.timedelta(days=source.randrange(2000))
        documents.append(Document(number, source.choice(kinds), day, " ".join(words)))
    # For each word the documents that have it, the newest first.
    index = collections.defaultdict(list)
    for document in sorted(documents, key=lambda document: document.day.toordinal(), reverse=True):
        for word in sorted(set(document.text.split())):
            index[word].append(document.number)
    return documents, dict(index)


documents, index = build()
pattern = re.compile(r"\b(\w+) (?:calm|quiet|mellow) (\w+)\b")
# Requests answered since the warm-up: a pristine guest always answers its first.
served = 0
# Where `plant` hides a secret, and what `grow` keeps.
hidden: str | None = None
ballast: list[bytearray] = []
native_dumps = json.dumps
# One encoder for all answers. Each call of `json.dumps` would make another one, of closures that
# refer to one another, which RustPython's collector does not free.
encode_parts = json.encoder._make_iterencode(
    None, None, json.encoder.encode_basestring_ascii, None, float.__repr__, ": ", ", ", False, False, True
)


def encode(value: typing.Any) -> str:
    return "".join(encode_parts(value, 0))


def query(word: str = "anvil", limit: int = 5) -> dict[str, typing.Any]:
    """Finds the newest documents with a word, counts the reads, and looks at their neighbours."""
    numbers = index.get(word, [])
    newest = numbers[:limit]
    found = []
    neighbours = collections.Counter()
    for number in newest:
        document = documents[number]
        document.reads += 1
        for match in pattern.finditer(document.text):
            neighbours.update(match.groups())
        found.append(
            {
                "number": number,
                "kind": document.kind.value,
                "day": document.day.isoformat(),
                "text": textwrap.shorten(document.text, 40),
                "reads": document.reads,
            }
        )
    digest = hashlib.sha256(encode(found).encode()).hexdigest()[:16]
    ages = [documents[number].day.toordinal() for number in newest]
    return {
        "documents": len(numbers),
        "found": found,
        "neighbours": dict(neighbours.most_common(3)),
        "median_day": datetime.date.fromordinal(int(statistics.median(ages))).isoformat() if ages else None,
        "digest": digest,
    }


def plant(secret: str = "unnamed") -> dict[str, typing.Any]:
    """Leaves a secret behind and spoils what every later request would use."""
    global hidden
    hidden = secret
    documents[0].text = secret
    Document.is_admin = True
    json.dumps = functools.partial(native_dumps, default=lambda _: secret)
    return {"planted": secret}


def probe() -> dict[str, typing.Any]:
    """Reports every trace of `plant` that a request can see."""
    traces = []
    if hidden is not None:
        traces.append(f"global: {hidden}")
    if len(documents[0].text.split()) != 12:
        traces.append(f"document 0: {documents[0].text}")
    if hasattr(Document, "is_admin"):
        traces.append("Document.is_admin")
    if json.dumps is not native_dumps:
        traces.append("json.dumps")
    return {"pristine": not traces, "traces": traces}


def draw(count: int = 4) -> dict[str, typing.Any]:
    return {"numbers": [random.random() for _ in range(count)]}


def grow(mib: int = 16) -> dict[str, typing.Any]:
    """Allocates and touches `mib` MiB, and keeps them."""
    ballast.append(bytearray(b"\x01") * (mib << 20))
    return {"grown": len(ballast[-1])}


def spin() -> dict[str, typing.Any]:
    """Never returns: the host's time limit must end it."""
    for count in itertools.count():
        hash(count)
    return {}


def throw(message: str = "raised on request") -> dict[str, typing.Any]:
    raise RuntimeError(message)


operations = {
    "query": query,
    "plant": plant,
    "probe": probe,
    "random": draw,
    "grow": grow,
    "spin": spin,
    "throw": throw,
}


def handle(text: str) -> str:
    global served
    served += 1
    request = json.loads(text)
    operation = operations.get(request.pop("op", None))
    if operation is None:
        raise ValueError(f"unknown op; known: {', '.join(operations)}")
    return encode({"served": served, **operation(**request)})


def reseed(lo: int, hi: int) -> None:
    random.seed(lo << 64 | hi)


random.seed(0)
# What the first request would otherwise be the one to set up.
for request in ('{"op": "query"}', '{"op": "probe"}'):
    handle(request)
documents, index = build()
served = 0
# A later collection need not visit, and so write to, what was built here.
gc.collect()
gc.freeze()
