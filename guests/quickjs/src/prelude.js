// The environment of a program: `console`, and functions for the operations of its host.
//
// Evaluated once, at the warm-up, as a function of `write(stream, text)`. It returns functions for
// the guest that no program can reach: one shows a value, and one distinguishes kinds of objects.
// It takes the built-in functions that it uses before any program can replace them.
"use strict";

((write) => {
  const { stringify } = JSON;
  const errorToString = Function.prototype.call.bind(Error.prototype.toString);
  const toISO = Function.prototype.call.bind(Date.prototype.toISOString);
  const getTime = Function.prototype.call.bind(Date.prototype.getTime);
  const wellFormed = Function.prototype.call.bind(String.prototype.toWellFormed);
  const bigintToString = Function.prototype.call.bind(BigInt.prototype.toString);
  const views = Object.getOwnPropertyDescriptors(Object.getPrototypeOf(Uint8Array.prototype));
  const viewName = Function.prototype.call.bind(views[Symbol.toStringTag].get);
  const viewBuffer = Function.prototype.call.bind(views.buffer.get);
  const viewOffset = Function.prototype.call.bind(views.byteOffset.get);
  const viewLength = Function.prototype.call.bind(views.byteLength.get);
  const { keys } = Object;
  const { isArray, from } = Array;
  const MOST = 100;
  const DEEPEST = 4;

  const show = (value, depth = 0, seen = []) => {
    switch (typeof value) {
      case "string":
        return depth === 0 ? value : stringify(value);
      case "bigint":
        return `${value}n`;
      case "symbol":
        return value.toString();
      case "function":
        return `[Function: ${value.name || "anonymous"}]`;
      case "object":
        break;
      default:
        return Object.is(value, -0) ? "-0" : `${value}`;
    }
    if (value === null) return "null";
    if (value instanceof Error) return value.stack ? `${errorToString(value)}\n${value.stack}`.trimEnd() : errorToString(value);
    if (value instanceof Date) return Number.isNaN(getTime(value)) ? "Invalid Date" : toISO(value);
    if (value instanceof RegExp) return `${value}`;
    if (seen.includes(value)) return "[Circular]";
    if (depth >= DEEPEST) return isArray(value) ? "[Array]" : "[Object]";
    const within = [...seen, value];
    const inner = (part) => show(part, depth + 1, within);
    const list = (parts, open, close, count = parts.length) => {
      const rest = count > MOST ? [`... ${count - MOST} more`] : [];
      const shown = [...parts.slice(0, MOST).map((part) => part()), ...rest];
      return shown.length === 0 ? `${open}${close}` : `${open} ${shown.join(", ")} ${close}`;
    };
    if (isArray(value) || ArrayBuffer.isView(value)) {
      const name = isArray(value) ? "" : `${value.constructor.name}(${value.length}) `;
      // An array can be as long as four thousand million holes.
      const first = from({ length: value.length > MOST ? MOST : value.length }, (_, at) => () => inner(value[at]));
      return name + list(first, "[", "]", value.length);
    }
    if (value instanceof Map) {
      return `Map(${value.size}) ` + list(from(value, ([k, v]) => () => `${inner(k)} => ${inner(v)}`), "{", "}");
    }
    if (value instanceof Set) return `Set(${value.size}) ` + list(from(value, (part) => () => inner(part)), "{", "}");
    if (value instanceof Promise) return "Promise {}";
    const name = value.constructor?.name;
    const own = keys(value).map((key) => () => {
      const plain = /^[A-Za-z_$][\w$]*$/.test(key) ? key : stringify(key);
      return `${plain}: ${inner(value[key])}`;
    });
    return (name && name !== "Object" ? `${name} ` : "") + list(own, "{", "}");
  };

  const say = (stream) => (...parts) => write(stream, `${parts.map((part) => show(part)).join(" ")}\n`);
  const [out, err] = [say(1), say(2)];
  const console = {
    log: out,
    info: out,
    debug: out,
    dir: out,
    warn: err,
    error: err,
    trace: err,
    assert: (holds, ...parts) => holds || err("Assertion failed", ...parts),
  };
  const define = (name, value) =>
    Object.defineProperty(globalThis, name, { value, writable: true, configurable: true, enumerable: false });
  define("console", console);
  define("print", out);

  return {
    // As a prompt would show it.
    show: (value) => show(value, typeof value === "string" ? 1 : 0),
    wellFormed,
    // The kind of an object on the wire: 0 is a plain object, the others are in `wire.rs`.
    kind: (value) => {
      if (value instanceof Date) return 1;
      if (value instanceof Map) return 2;
      if (value instanceof Set) return 3;
      if (value instanceof Uint8Array) return 4;
      if (value instanceof ArrayBuffer) return 5;
      if (viewName(value) !== undefined) return 6;
      if (value instanceof Error) return 7;
      if (value instanceof Promise) return 8;
      return value instanceof RegExp ? 9 : 0;
    },
    time: (value) => getTime(value),
    entries: (value) => from(value, ([key, part]) => [key, part]).flat(1),
    members: (value) => from(value),
    bytes: (value) => new Uint8Array(value),
    // The kind of a typed array, whatever its class is called, and its bytes.
    viewName: (value) => viewName(value),
    viewBytes: (value) => new Uint8Array(viewBuffer(value), viewOffset(value), viewLength(value)),
    date: (seconds) => new Date(seconds * 1000),
    // A day alone is midnight in UTC, as everywhere in JavaScript.
    moment: (text) => new Date(text),
    map: (flat) => {
      const map = new Map();
      for (let i = 0; i < flat.length; i += 2) map.set(flat[i], flat[i + 1]);
      return map;
    },
    set: (members) => new Set(members),
    bigint: (text) => BigInt(text),
    // A BigInt from bytes: read with one digit too many, and negative ones count from minus one.
    unpad: (padded, negative) => (negative ? -1n - padded / 16n : padded / 16n),
    hex: (value) => bigintToString(value, 16),
    // An error that the host made.
    failure: (name, message, id) => {
      const error = new Error(message);
      Object.defineProperty(error, "name", { value: name, writable: true, configurable: true });
      Object.defineProperty(error, "hostError", { value: id });
      return error;
    },
  };
})
