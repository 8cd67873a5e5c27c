// A module of AssemblyScript, whose heap is kept by its own collector: a warehouse that is filled
// once, and changed by every call.

class Thing {
  constructor(public id: i32, public name: string) {}
}

const things: Thing[] = [];
const byName = new Map<string, Thing>();
let served: i32 = 0;

function add(id: i32, name: string): void {
  const thing = new Thing(id, name);
  things.push(thing);
  byName.set(name, thing);
}

/** Fills it. */
export function warm(): void {
  for (let id = 0; id < 20000; id++) add(id, "thing " + id.toString());
}

/**
 * Adds an item. Returns the number of calls, the number of items, and whether `id` existed before.
 */
export function handle(id: i32): i64 {
  served++;
  const before = byName.has("canary " + id.toString());
  add(id, "canary " + id.toString());
  return ((served as i64) * 100000 + things.length) * 10 + (before ? 1 : 0);
}
