'use strict'
// The package `afresh`: sandboxes that start warm, fork, and roll back.

const { Command, CommandResult, Commands } = require('./lib/commands.js')
const {
  AfreshError,
  BusyError,
  CommandError,
  GuestError,
  MarshalError,
  OpenError,
  ProgramError,
  SandboxError,
  SaveError,
  StoppedError,
  TimeoutError,
} = require('./lib/errors.js')
const { exec, image, linux } = require('./lib/linux.js')
const { cacheDir } = require('./lib/options.js')
const { Result } = require('./lib/result.js')
const { RichResult } = require('./lib/rich.js')
const { Checkpoint, Sandbox } = require('./lib/sandbox.js')
const { Opaque } = require('./lib/values.js')
const { load, Warm, warm } = require('./lib/warm.js')

module.exports = {
  AfreshError,
  BusyError,
  Checkpoint,
  Command,
  CommandError,
  CommandResult,
  Commands,
  GuestError,
  MarshalError,
  Opaque,
  OpenError,
  ProgramError,
  Result,
  RichResult,
  Sandbox,
  SandboxError,
  SaveError,
  StoppedError,
  TimeoutError,
  Warm,
  cacheDir,
  exec,
  image,
  linux,
  load,
  warm,
}
