// What the interpreter's programs find there besides the language: a console that writes down what is printed,
// and how values are shown. `report` is the host's way in and out; it is called once for each piece of code.
"use strict";

((globalThis) => {
  const LIMIT = 100;
  let printed = [];

  const quote = (text) => JSON.stringify(text);

  // A value as a person wants to read it: deep enough to be useful, and finite.
  const show = (value, seen, nested) => {
    switch (typeof value) {
      case "string":
        return nested ? quote(value) : value;
      case "bigint":
        return `${value}n`;
      case "symbol":
        return value.toString();
      case "function":
        return value.name === "" ? "[function]" : `[function ${value.name}]`;
      case "object":
        break;
      default:
        return Object.is(value, -0) ? "-0" : String(value);
    }
    if (value === null) return "null";
    if (seen.includes(value)) return "[circular]";
    if (value instanceof Error) return `${value.name}: ${value.message}`;
    if (value instanceof Date) return Number.isNaN(+value) ? "Invalid Date" : value.toISOString();
    if (value instanceof RegExp) return String(value);
    if (value instanceof Promise) return "[promise]";
    const inner = [...seen, value];
    if (inner.length > 6) return Array.isArray(value) ? "[array]" : "[object]";
    const some = (items, each) => {
      const shown = items.slice(0, LIMIT).map(each);
      if (items.length > LIMIT) shown.push(`… ${items.length - LIMIT} more`);
      return shown.join(", ");
    };
    if (Array.isArray(value) || ArrayBuffer.isView(value)) {
      return `[${some(Array.from(value), (item) => show(item, inner, true))}]`;
    }
    if (value instanceof Map) {
      const pairs = some([...value], ([k, v]) => `${show(k, inner, true)} => ${show(v, inner, true)}`);
      return `Map {${pairs}}`;
    }
    if (value instanceof Set) return `Set {${some([...value], (item) => show(item, inner, true))}}`;
    const name = Object.getPrototypeOf(value)?.constructor?.name ?? "Object";
    const fields = some(Object.keys(value), (key) => {
      const plain = /^[A-Za-z_$][\w$]*$/.test(key) ? key : quote(key);
      return `${plain}: ${show(value[key], inner, true)}`;
    });
    return `${name === "Object" ? "" : `${name} `}{${fields === "" ? "" : ` ${fields} `}}`;
  };

  const print = (stream) => (...values) => {
    printed.push([stream, `${values.map((value) => show(value, [], false)).join(" ")}\n`]);
  };
  const [out, err] = [print("stdout"), print("stderr")];
  globalThis.console = { log: out, info: out, debug: out, warn: err, error: err };
  globalThis.print = out;

  // What the code printed, and what it gave: `kind` is "value" or "error".
  globalThis.report = (kind, value) => {
    const answer = { printed };
    printed = [];
    if (kind === "error") {
      const error = value instanceof Error ? value : { name: "Error", message: show(value, [], false) };
      const name = String(error.name ?? "Error");
      const message = String(error.message ?? "");
      answer.error = { name, value: message, traceback: `${name}: ${message}\n${error.stack ?? ""}` };
    } else if (value !== undefined) {
      answer.value = { text: show(value, [], true) };
      try {
        if (typeof value === "object") answer.value.json = JSON.parse(JSON.stringify(value));
      } catch {
        // What has a circle in it, or throws, has no JSON.
      }
    }
    return JSON.stringify(answer);
  };
})(globalThis);
