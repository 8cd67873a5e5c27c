// A handler of wasi:http for componentize-js: a catalogue that is made when the component is built,
// and queries of it.
//
// `GET /?under=N` counts the cheap things in it; a body is planted into the state, where a request
// that came later could find it.

const catalogue = new Map();
for (let number = 0; number < 20000; number++) {
  const thing = { price: (number * 7919) % 1000, tags: [`t${number % 7}`, `u${number % 11}`] };
  catalogue.set(`thing-${number}`, thing);
}
const state = { served: 0, planted: null };

function answer(url, body) {
  const before = state.planted;
  state.served += 1;
  if (body) {
    state.planted = body;
    catalogue.set(body, { price: 0, tags: [] });
  }
  const under = Number(new URL(url).searchParams.get("under") ?? 10);
  let [found, seen] = [0, 0];
  for (const thing of catalogue.values()) {
    if (seen++ === 200) break;
    if (thing.price < under) found += 1;
  }
  return JSON.stringify({ served: state.served, things: catalogue.size, found, before });
}

addEventListener("fetch", (event) =>
  event.respondWith(
    (async () => {
      const said = answer(event.request.url, await event.request.text());
      return new Response(said, { headers: { "content-type": "application/json" } });
    })(),
  ),
);
