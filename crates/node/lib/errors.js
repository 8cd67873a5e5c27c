'use strict'
// Errors of the package: each names the cause and the way out.

/** The base of every error of this package. */
class AfreshError extends Error {
  get name() {
    return this.constructor.name
  }
}

/** A guest cannot be opened or warmed up. */
class OpenError extends AfreshError {}
/** The guest failed: it trapped, or ended itself. */
class GuestError extends AfreshError {}
/** The operation was stopped by its host. */
class StoppedError extends AfreshError {}
/** A sandbox cannot be used or moved like this. */
class SandboxError extends AfreshError {}
/** Another call is under way in the same sandbox. */
class BusyError extends SandboxError {}
/** A state cannot be saved. */
class SaveError extends AfreshError {}
/** A value cannot be carried between host and guest. */
class MarshalError extends AfreshError {}
/** The operation took longer than its time limit. */
class TimeoutError extends AfreshError {}

/** The program threw something and did not catch it. An error of a tool is the `cause`. */
class ProgramError extends AfreshError {
  constructor(type, reason, trace, options) {
    const said = reason ? `${type}: ${reason}` : type
    const shown = trace?.trimEnd()
    super(!shown ? said : shown.includes(said) ? shown : `${said}\n${shown}`, options)
    this.type = type
    this.reason = reason
    this.trace = trace ?? undefined
  }
}

/** A command ended with an exit code other than 0, and its result was checked. */
class CommandError extends AfreshError {
  constructor({ exitCode, stdout, stderr }) {
    const ended = exitCode >= 0 ? `exited with ${exitCode}` : `was ended by signal ${-exitCode}`
    super(stderr.trim() ? `the command ${ended}: ${stderr.trimEnd()}` : `the command ${ended}`)
    Object.assign(this, { exitCode, stdout, stderr })
  }
}

const classes = {
  AfreshError,
  OpenError,
  GuestError,
  StoppedError,
  SandboxError,
  BusyError,
  SaveError,
  MarshalError,
  TimeoutError,
  ProgramError,
  CommandError,
}

/** The error that the native half describes. */
function ofNative({ class: name, message }) {
  return name === 'TypeError' ? new TypeError(message) : new (classes[name] ?? AfreshError)(message)
}

module.exports = { ...classes, ofNative }
