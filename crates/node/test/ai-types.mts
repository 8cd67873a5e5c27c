// Checked by `tsc --strict`, not run: the tools are what the AI SDK takes.
import { generateText, stepCountIs, ToolLoopAgent, type LanguageModel } from 'ai'
import { linux } from 'afresh'
import { sandboxTools } from 'afresh/ai'
import { Client } from 'afresh/client'

export async function accepted(model: LanguageModel): Promise<string> {
  const remote = await new Client().create('script')
  const tools = sandboxTools(remote)
  const done = await generateText({ model, tools, prompt: 'Compute 6 * 7.', stopWhen: stepCountIs(9) })
  for (const call of done.toolResults) {
    if (!call.dynamic && call.toolName === 'run_code') console.log(call.input.code, call.output.length)
  }
  await using local = await (await linux('python3')).sandbox()
  const agent = new ToolLoopAgent({ model, tools: sandboxTools(local, { commands: true }) })
  return (await agent.generate({ prompt: 'List the files.' })).text
}

export function refused(remote: Awaited<ReturnType<Client['create']>>): void {
  // @ts-expect-error: a sandbox of a server has no commands in this client.
  sandboxTools(remote, { commands: true })
  // @ts-expect-error: commands are an option.
  void sandboxTools(remote).run_command
}
