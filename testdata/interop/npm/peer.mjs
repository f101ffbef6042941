// A server on the TypeScript SDK, version 2, for the tests of this folder's
// parent: the tools are those of the Go server, as far as they go. "stdio"
// serves stdio; "http" serves Streamable HTTP at a free port and says where on
// standard error; "http json" answers in JSON where it can.
import { createServer } from 'node:http';
import { McpServer, acceptedContent, completable, createMcpHandler, inputRequired } from '@modelcontextprotocol/server';
import { serveStdio } from '@modelcontextprotocol/server/stdio';
import { toNodeHandler } from '@modelcontextprotocol/node';
import { z } from 'zod';

const counters = { started: 0, finished: 0, cancelled: 0 };
const learnt = [];
let handler; // of HTTP, which has a server object for each request

const text = s => ({ content: [{ type: 'text', text: s }] });

function factory() {
  const s = new McpServer({ name: 'interop-ts', version: '1' }, { instructions: 'A peer for tests.', capabilities: { tools: { listChanged: true }, logging: {} } });
  s.registerTool('echo', { inputSchema: z.object({ text: z.string() }) }, async ({ text: t }) => text(t));
  s.registerTool('sum', { inputSchema: z.object({ numbers: z.array(z.number()) }), outputSchema: z.object({ sum: z.number() }) }, async ({ numbers }) => {
    const out = { sum: numbers.reduce((a, b) => a + b, 0) };
    return { ...text(JSON.stringify(out)), structuredContent: out };
  });
  s.registerTool('counters', { inputSchema: z.object({}), outputSchema: z.object({ started: z.number(), finished: z.number(), cancelled: z.number() }) },
    async () => ({ ...text(JSON.stringify(counters)), structuredContent: { ...counters } }));
  s.registerTool('work', { inputSchema: z.object({ steps: z.number(), millis: z.number() }) }, async ({ steps, millis }, ctx) => {
    counters.started++;
    const progressToken = ctx.mcpReq._meta?.progressToken;
    for (let i = 1; i <= steps; i++) {
      await new Promise(r => setTimeout(r, millis));
      if (ctx.mcpReq.signal.aborted) {
        counters.cancelled++;
        throw new Error('cancelled');
      }
      if (progressToken !== undefined)
        await ctx.mcpReq.notify({ method: 'notifications/progress', params: { progressToken, progress: i, total: steps, message: `step ${i}` } });
    }
    counters.finished++;
    return text('worked');
  });
  s.registerTool('refuse', { inputSchema: z.object({}) }, async () => { throw new Error('refused on purpose'); });
  s.registerTool('ask', { inputSchema: z.object({}) }, async (_, ctx) => {
    const a = acceptedContent(ctx.mcpReq.inputResponses, 'who');
    if (a) return text(`accept ${a.name} ${a.color} ${ctx.mcpReq.requestState() ?? ''}`);
    return inputRequired({
      requestState: 'asked',
      inputRequests: {
        who: inputRequired.elicit({
          message: 'Who are you?',
          requestedSchema: { type: 'object', properties: { name: { type: 'string' }, color: { type: 'string', default: 'green' } }, required: ['name'] },
        }),
      },
    });
  });
  s.registerTool('think', { inputSchema: z.object({ prompt: z.string() }) }, async ({ prompt }, ctx) => {
    const a = ctx.mcpReq.inputResponses?.thought;
    if (a) return text(`${a.model} ${[a.content].flat()[0].text}`);
    return inputRequired({
      inputRequests: { thought: inputRequired.createMessage({ maxTokens: 10, messages: [{ role: 'user', content: { type: 'text', text: prompt } }] }) },
    });
  });
  s.registerTool('where', { inputSchema: z.object({}) }, async (_, ctx) => {
    const a = ctx.mcpReq.inputResponses?.roots;
    if (a) return text(a.roots.map(r => r.uri).join(' '));
    return inputRequired({ inputRequests: { roots: inputRequired.listRoots() } });
  });
  s.registerTool('repeat', { inputSchema: z.object({ text: z.string(), times: z.number() }) }, async ({ text: t, times }) => text(t.repeat(times)));
  s.registerTool('mixed', { inputSchema: z.object({}) }, async () => ({
    content: [
      { type: 'text', text: 'mixed' },
      { type: 'resource_link', uri: 'test://note', name: 'note', mimeType: 'text/plain' },
      { type: 'resource', resource: { uri: 'test://inline', mimeType: 'text/plain', text: 'inline' } },
      { type: 'image', mimeType: 'image/png', data: Buffer.from('png').toString('base64') },
    ],
  }));
  s.registerTool('talk', { inputSchema: z.object({ lines: z.number() }) }, async ({ lines }, ctx) => {
    for (let i = 1; i <= lines; i++) await ctx.mcpReq.log('info', i);
    return text('talked');
  });
  s.registerTool('env', { inputSchema: z.object({ name: z.string() }) }, async ({ name }) => text(process.env[name] ?? ''));
  s.registerTool('quit', { inputSchema: z.object({ status: z.number() }) }, async ({ status }) => process.exit(status));
  s.registerTool('learn', { inputSchema: z.object({ name: z.string() }) }, async ({ name }) => {
    learnt.push(name);
    add(name);
    handler?.notify.toolsChanged();
    return text(`knows ${name}`);
  });
  const add = name => s.registerTool(name, { inputSchema: z.object({}) }, async () => text('learnt'));
  learnt.forEach(add);

  s.registerResource('note', 'test://note', { mimeType: 'text/plain' }, async uri => ({ contents: [{ uri: uri.href, mimeType: 'text/plain', text: 'a note' }] }));
  s.registerPrompt('greet', {
    argsSchema: z.object({ name: completable(z.string(), v => ['ada', 'alan', 'grace'].filter(n => n.startsWith(v))) }),
  }, ({ name }) => ({ messages: [{ role: 'user', content: { type: 'text', text: `Greet ${name}` } }] }));
  return s;
}

if (process.argv[2] === 'http') {
  handler = createMcpHandler(factory, { responseMode: process.argv[3] === 'json' ? 'json' : 'auto' });
  const serve = toNodeHandler(handler);
  const server = createServer((q, r) => serve(q, r));
  server.listen(+(process.argv[4] ?? 0), '127.0.0.1', () => console.error(`listening http://127.0.0.1:${server.address().port}`));
} else {
  serveStdio(factory);
}
