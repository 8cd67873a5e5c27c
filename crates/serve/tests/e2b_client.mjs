// Requests of an unmodified client of E2B in JavaScript to our server, which the environment names.

import assert from "node:assert/strict";
import { createRequire } from "node:module";

// Wherever it was installed.
const require = createRequire(`${process.env.AFRESH_TEST_E2B_JS}/`);
const { Sandbox, AuthenticationError, FileNotFoundError, TimeoutError } = require("@e2b/code-interpreter");

const sandbox = await Sandbox.create("script", { timeoutMs: 600_000, metadata: { who: "test" } });
assert(await sandbox.isRunning());

const printed = [];
const execution = await sandbox.runCode(
  "let x = 40; console.log('one'); console.log('two'); console.error('three'); ({ answer: x + 2 })",
  { language: "javascript", onStdout: (message) => printed.push(message.line) },
);
assert.deepEqual(printed, ["one\n", "two\n"]);
assert.deepEqual(execution.logs.stderr, ["three\n"]);
assert.equal(execution.error, undefined);
assert.equal(execution.text, "{ answer: 42 }");
assert.deepEqual(execution.results[0].json, { answer: 42 });

const failed = await sandbox.runCode("null.nothing");
assert.equal(failed.error?.name, "TypeError");
assert.equal((await sandbox.runCode("x += 1")).text, "41");

// The time limit of silent code ends it.
await assert.rejects(sandbox.runCode("x = 0; for (;;) {}", { timeoutMs: 300 }), TimeoutError);
assert.equal((await sandbox.runCode("x")).text, "41");

const info = await sandbox.getInfo();
assert.equal(info.sandboxId, sandbox.sandboxId);
assert.deepEqual(info.metadata, { who: "test" });
await sandbox.setTimeout(700_000);
assert((await sandbox.getInfo()).endAt > info.endAt);

const written = await sandbox.files.write("notes/one.txt", "first");
assert.equal(written.path, "/home/user/notes/one.txt");
assert.equal(await sandbox.files.read("notes/one.txt"), "first");
const bytes = Uint8Array.from({ length: 25_600 }, (_, n) => n % 256);
await sandbox.files.write("/data/bytes", bytes.buffer);
assert.deepEqual(await sandbox.files.read("/data/bytes", { format: "bytes" }), bytes);
assert.deepEqual((await sandbox.files.list("notes")).map((found) => found.name), ["one.txt"]);
assert(await sandbox.files.exists("notes") && !(await sandbox.files.exists("nothing")));
assert(await sandbox.files.makeDir("deep/er") && !(await sandbox.files.makeDir("deep")));
await sandbox.files.rename("notes/one.txt", "deep/two.txt");
await assert.rejects(sandbox.files.read("notes/one.txt"), FileNotFoundError);
await sandbox.files.remove("/data");
assert(!(await sandbox.files.exists("/data/bytes")));

const seen = [];
const watch = await sandbox.files.watchDir("deep", (event) => seen.push(`${event.type} ${event.name}`));
await sandbox.files.write("deep/watched", "1");
while (seen.length < 3) await new Promise((resolve) => setTimeout(resolve, 10));
assert.deepEqual(seen, ["create watched", "chmod watched", "write watched"]);
await watch.stop();
await assert.rejects(sandbox.files.watchDir("nothing", () => {}), FileNotFoundError);

const forks = await sandbox.fork({ count: 3, timeoutMs: 600_000 });
assert.equal(forks.length, 3);
for (const [number, fork] of forks.entries()) {
  assert(fork instanceof Sandbox, String(fork));
  assert.equal((await fork.runCode(`x += ${number}`)).text, String(41 + number));
  assert.equal(await fork.files.read("deep/two.txt"), "first");
}
assert.equal((await sandbox.runCode("x")).text, "41");

const snapshot = await sandbox.createSnapshot({ name: "kept" });
await sandbox.runCode("x = 'changed'");
const again = await Sandbox.create(snapshot.snapshotId);
assert.equal((await again.runCode("x")).text, "41");
assert(await Sandbox.deleteSnapshot(snapshot.snapshotId));

assert(await again.pause());
assert(!(await again.isRunning()));
const resumed = await Sandbox.connect(again.sandboxId, { timeoutMs: 600_000 });
assert.equal((await resumed.runCode("x + 1")).text, "42");

for (const live of [sandbox, resumed, ...forks]) {
  assert(await live.kill());
  assert(!(await live.isRunning()));
}
assert.deepEqual(await Sandbox.list().nextItems(), []);

await assert.rejects(Sandbox.create("script", { apiKey: "wrong" }), AuthenticationError);
await assert.rejects(sandbox.runCode("1"));
console.log("all done");
// The client keeps connections for a while, and Node would wait for them.
process.exit(0);
