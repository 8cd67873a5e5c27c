/** Tools for the AI SDK (`ai`, version 6 or 7) over one sandbox. */

import type { Tool } from 'ai'
import type { RemoteSandbox } from './client.js'
import type { Sandbox } from './index.js'

/** The tools of a sandbox. Their results are text, and so are errors, for the model to read. */
export type SandboxTools = {
  run_code: Tool<{ code: string }, string>
  read_file: Tool<{ path: string }, string>
  write_file: Tool<{ path: string; content: string }, string>
  checkpoint: Tool<{ name: string }, string>
  rollback: Tool<{ name: string }, string>
}

/** A tool for commands beside the others. */
export type CommandTools = SandboxTools & {
  run_command: Tool<{ command: string }, string>
}

/**
 * The tools of a sandbox of this process or of a server, for `generateText`, `streamText` and
 * agents.
 */
export function sandboxTools(sandbox: Sandbox | RemoteSandbox, options?: { commands?: false }): SandboxTools
/** With `commands`, for a sandbox of a Linux program in this process. */
export function sandboxTools(sandbox: Sandbox, options: { commands: true }): CommandTools
