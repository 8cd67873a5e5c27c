"""A handler of wasi:http for componentize-py: a catalogue that is made when the component is built, and queries of it.

`GET /?under=N` counts the cheap things in it; a body is planted into the state, where a request that came later could find it.
"""

import json
from urllib.parse import parse_qs, urlsplit

from componentize_py_types import Err, Ok
from wit_world import exports
from wit_world.imports.streams import StreamError_Closed
from wit_world.imports.types import (
    Fields,
    IncomingBody,
    IncomingRequest,
    OutgoingBody,
    OutgoingResponse,
    ResponseOutparam,
)

CATALOGUE = {
    f"thing-{number}": {"price": number * 7919 % 1000, "tags": [f"t{number % 7}", f"u{number % 11}"]}
    for number in range(20_000)
}
STATE = {"served": 0, "planted": None}


def body_of(request: IncomingRequest) -> bytes:
    body = request.consume()
    parts = []
    with body.stream() as stream:
        while True:
            try:
                parts.append(stream.blocking_read(64 << 10))
            except Err as error:
                if isinstance(error.value, StreamError_Closed):
                    break
                raise
    IncomingBody.finish(body)
    return b"".join(parts)


def answer(path: str, body: bytes) -> bytes:
    before = STATE["planted"]
    STATE["served"] += 1
    if body:
        STATE["planted"] = body.decode()
        CATALOGUE[STATE["planted"]] = {"price": 0, "tags": []}
    under = int(parse_qs(urlsplit(path).query).get("under", ["10"])[0])
    first = list(CATALOGUE.items())[:200]
    found = sum(thing["price"] < under for _, thing in first)
    said = {"served": STATE["served"], "things": len(CATALOGUE), "found": found, "before": before}
    return json.dumps(said).encode()


class IncomingHandler(exports.IncomingHandler):
    def handle(self, request: IncomingRequest, response_out: ResponseOutparam) -> None:
        said = answer(request.path_with_query() or "/", body_of(request))
        response = OutgoingResponse(Fields.from_list([("content-type", b"application/json")]))
        body = response.body()
        ResponseOutparam.set(response_out, Ok(response))
        with body.write() as stream:
            stream.blocking_write_and_flush(said)
        OutgoingBody.finish(body, None)
