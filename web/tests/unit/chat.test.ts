import { describe, expect, it } from 'vitest';
import { modelsPath, pieceOf } from '../../src/lib/chat';

describe('answers of a model', () => {
  it('come in pieces', () => {
    expect(pieceOf('{"choices":[{"delta":{"content":"wo"}}]}')).toBe('wo');
    expect(pieceOf('{"choices":[{"delta":{"role":"assistant"}}]}')).toBe('');
    expect(pieceOf('{"choices":[{"delta":{"content":null},"finish_reason":"stop"}]}')).toBe('');
    expect(pieceOf('{"choices":[],"usage":{"total_tokens":7}}')).toBe('');
    expect(pieceOf('[DONE]')).toBe(null);
  });

  it('can end with an error', () => {
    expect(() => pieceOf('{"error":{"message":"out of memory"}}')).toThrow('out of memory');
    expect(() => pieceOf('{"error":{}}')).toThrow('stopped with an error');
  });

  it('come from the endpoint of the project', () => {
    expect(modelsPath('a/b')).toBe('/proxy/models/a%2Fb');
  });
});
