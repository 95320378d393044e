/** Chat with a model through the OpenAI-compatible endpoint of its project. */
import { HEADERS } from './call';

export interface ChatMessage {
  role: 'system' | 'user' | 'assistant';
  content: string;
}

export interface ChatSettings {
  temperature: number | null;
  max_tokens: number | null;
}

/** Address of the endpoint, for people. */
export const modelsPath = (project: string) => `/proxy/models/${encodeURIComponent(project)}`;

/** Text that an answer adds; a stream says it in pieces. Null at its end. */
export function pieceOf(data: string): string | null {
  if (data === '[DONE]') return null;
  const { choices, error } = JSON.parse(data) as { choices?: { delta?: { content?: string | null } }[]; error?: { message?: string } };
  if (error) throw new Error(error.message ?? 'The model stopped with an error.');
  return choices?.[0]?.delta?.content ?? '';
}

/** Asks for the next message and tells its pieces as they come. */
export async function complete(project: string, model: string, messages: ChatMessage[], settings: ChatSettings, signal: AbortSignal, onpiece: (text: string) => void): Promise<void> {
  const given = Object.fromEntries(Object.entries(settings).filter(([, value]) => value !== null));
  const response = await fetch(`${modelsPath(project)}/chat/completions`, {
    method: 'POST', credentials: 'same-origin', cache: 'no-store', signal,
    headers: { ...HEADERS, 'Content-Type': 'application/json' }, body: JSON.stringify({ model, messages, stream: true, ...given }),
  });
  if (!response.ok || !response.body) throw new Error(await refusal(response));
  if (!response.headers.get('Content-Type')?.startsWith('text/event-stream')) {
    // A model that does not stream.
    const { choices } = (await response.json()) as { choices?: { message?: { content?: string } }[] };
    onpiece(choices?.[0]?.message?.content ?? '');
    return;
  }
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = '';
  for (;;) {
    const { value, done } = await reader.read();
    rest += value ?? '';
    const lines = rest.split(/\r?\n/);
    rest = done ? '' : (lines.pop() ?? '');
    for (const line of lines) {
      if (!line.startsWith('data:')) continue;
      const piece = pieceOf(line.slice(5).trim());
      if (piece === null) return void reader.cancel();
      if (piece) onpiece(piece);
    }
    if (done) return;
  }
}

async function refusal(response: Response): Promise<string> {
  const text = await response.text();
  try {
    const { error, detail } = JSON.parse(text) as { error?: { message?: string }; detail?: string };
    return error?.message ?? detail ?? text;
  } catch {
    return text.trim().slice(0, 300) || `The model answered ${response.status}.`;
  }
}
