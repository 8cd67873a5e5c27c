'use strict'
// Shared by the tests: one warm guest for each test file, and a probe for Linux guests.

const afresh = require('afresh')

let js
/** A warm JavaScript guest, which all tests of a file share. */
exports.js = () => (js ??= afresh.warm('js', { setup: 'const greet = (name) => `hello, ${name}`; globalThis.count = 40' }))

/** Runs a test with a sandbox of it, and closes that. */
exports.withSandbox = (options, run) => async (t) => {
  const sandbox = await (await exports.js()).sandbox(options)
  try {
    await run(sandbox, t)
  } finally {
    await sandbox.close()
  }
}

/** Collects garbage, and lets finalizers run. */
exports.collect = async () => {
  for (let round = 0; round < 5; round += 1) {
    global.gc()
    await new Promise((resolve) => setTimeout(resolve, 10))
  }
}
