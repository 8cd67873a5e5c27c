// The program that the JavaScript guest is warmed with: a product catalogue held in memory, and the
// handler that answers requests on it.
//
// Evaluating this file builds 200,000 objects: 80,000 products, the tag array of each, and 40,000
// customers. `handle` takes a request as JSON text and returns the answer as JSON text. Nothing
// here tidies up after itself: whatever a request changes stays changed until the host resets the
// guest, and the operations below `query` exist to show that it does.
"use strict";

(() => {
  const PRODUCTS = 80_000;
  const CUSTOMERS = 40_000;
  const TAGS = 400;
  const ADJECTIVES = ["amber", "brisk", "calm", "dusky", "early", "frosty", "grand", "hollow"];
  const NOUNS = ["anvil", "basket", "candle", "drum", "easel", "flask", "gasket", "hammer", "inkwell"];

  // A fixed sequence, so that every build of the heap is the same (Lehmer, modulus 2^31 - 1).
  let state = 20_260_101;
  const next = (bound) => (state = (state * 48_271) % 2_147_483_647) % bound;

  const products = new Map();
  const byTag = new Map();
  const customers = [];
  const prices = new Float64Array(PRODUCTS);

  for (let i = 0; i < TAGS; i++) byTag.set(`tag-${i}`, []);

  for (let id = 0; id < PRODUCTS; id++) {
    const tags = [`tag-${next(TAGS)}`, `tag-${next(TAGS)}`, `tag-${next(TAGS)}`];
    const product = {
      id,
      name: `${ADJECTIVES[next(ADJECTIVES.length)]} ${NOUNS[next(NOUNS.length)]} ${id}`,
      price: (100 + next(99_900)) / 100,
      stock: next(1000),
      views: 0,
      tags,
    };
    prices[id] = product.price;
    products.set(id, product);
    for (const tag of tags) byTag.get(tag).push(product);
  }

  for (let id = 0; id < CUSTOMERS; id++) {
    customers.push({ id, name: `customer ${id}`, spent: 0, last: -1, vip: next(20) === 0 });
  }

  // Requests answered since the warm-up: a pristine guest always answers its first.
  let served = 0;
  // Where `plant` hides a secret that no property lookup finds.
  let hidden = null;
  const nativeMap = Array.prototype.map;

  const operations = {
    // Looks products up, counts the look-ups, lets a customer buy them, and sums up one tag.
    query({ ids = [1, 40_000, 79_999], tag = "tag-7", customer = 0, scan = 64 }) {
      const found = [];
      let total = 0;
      for (const id of ids) {
        const product = products.get(id);
        if (product === undefined) throw new RangeError(`no product ${id}`);
        product.views += 1;
        product.stock -= 1;
        total += product.price;
        found.push({ id, name: product.name, price: product.price, stock: product.stock, views: product.views });
      }
      const buyer = customers[customer];
      if (buyer === undefined) throw new RangeError(`no customer ${customer}`);
      buyer.spent += total;
      buyer.last = ids.length > 0 ? ids[ids.length - 1] : -1;
      const tagged = byTag.get(tag) ?? [];
      let cheapest = Infinity;
      let sum = 0;
      const seen = Math.min(scan, tagged.length);
      for (let i = 0; i < seen; i++) {
        const price = tagged[i].price;
        sum += price;
        if (price < cheapest) cheapest = price;
      }
      return {
        found,
        total: Math.round(total * 100) / 100,
        buyer: { name: buyer.name, spent: Math.round(buyer.spent * 100) / 100 },
        tag: { name: tag, products: tagged.length, seen, mean: seen ? Math.round((sum / seen) * 100) / 100 : 0, cheapest },
      };
    },

    // Reads the whole price column: much work, few pages changed.
    sum() {
      let sum = 0;
      for (let i = 0; i < prices.length; i++) sum += prices[i];
      return { products: prices.length, sum: Math.round(sum * 100) / 100 };
    },

    // Leaves a secret behind and pollutes what every later request would use.
    plant({ secret = "unnamed" }) {
      hidden = secret;
      globalThis.secret = secret;
      Object.prototype.isAdmin = true;
      Array.prototype.map = function () {
        return [secret];
      };
      products.get(0).name = secret;
      return { planted: secret };
    },

    // Reports every trace of `plant` that a request can see.
    probe() {
      const traces = [];
      if (hidden !== null) traces.push(`closure: ${hidden}`);
      if (globalThis.secret !== undefined) traces.push(`global: ${globalThis.secret}`);
      for (const key in {}) traces.push(`Object.prototype.${key}`);
      if (Array.prototype.map !== nativeMap) traces.push("Array.prototype.map");
      if (!products.get(0).name.endsWith(" 0")) traces.push(`product 0: ${products.get(0).name}`);
      return { pristine: traces.length === 0, traces };
    },

    random({ count = 4 }) {
      return { numbers: Array.from({ length: count }, () => Math.random()) };
    },

    // Allocates and touches `mib` MiB, and keeps them.
    grow({ mib = 16 }) {
      const ballast = new Uint8Array(mib * 1024 * 1024);
      for (let i = 0; i < ballast.length; i += 4096) ballast[i] = 1;
      globalThis.ballast = ballast;
      return { grown: ballast.length };
    },

    // Never returns: the host's time limit must end it.
    spin() {
      for (;;) served += 1;
    },

    throw({ message = "thrown on request" }) {
      throw new Error(message);
    },

    // Overflows the stack, which traps.
    recurse() {
      const deeper = (n) => deeper(n + 1) + 1;
      return { depth: deeper(0) };
    },

    // Traps outright.
    abort() {
      abort();
    },
  };

  globalThis.handle = (text) => {
    served += 1;
    const request = JSON.parse(text);
    const operation = Object.hasOwn(operations, request.op) ? operations[request.op] : null;
    if (operation === null) {
      throw new TypeError(`unknown op ${JSON.stringify(request.op)}; known: ${Object.keys(operations).join(", ")}`);
    }
    return JSON.stringify({ served, ...operation(request) });
  };
})();
