import { describe, expect, it } from 'vitest';
import type { RunRow } from '../../src/api/api';
import { format, has, matches, parse, request, toggle } from '../../src/text/filter';

const NOW = Date.parse('2026-11-17T12:00:00Z');

describe('filter language', () => {
  it('reads tokens and words', () => {
    const filter = parse('status:failed,running user:ada  hello fleet:gpu world');
    expect(filter.values).toEqual({ status: ['failed', 'running'], user: ['ada'], fleet: ['gpu'] });
    expect(filter.text).toBe('hello world');
  });

  it('takes unknown names as text and leaves empty values out', () => {
    expect(parse('http://x status: foo:bar')).toEqual({ values: {}, text: 'http://x foo:bar' });
  });

  it('knows quotes', () => {
    expect(parse('user:"ada l" "two words"')).toEqual({ values: { user: ['ada l'] }, text: 'two words' });
  });

  it('is the same after it is written and read again', () => {
    for (const text of ['status:failed user:ada x y', 'user:"ada l"', 'a b c', '', 'since:2h status:done,failed']) {
      expect(parse(format(parse(text)))).toEqual(parse(text));
    }
  });

  it('toggles values', () => {
    expect(toggle('x', 'status', 'failed')).toBe('status:failed x');
    expect(toggle('status:failed,done x', 'status', 'failed')).toBe('status:done x');
    expect(toggle('status:failed', 'status', 'failed')).toBe('');
    expect(has('status:failed', 'status', 'failed')).toBe(true);
  });

  it('asks the server', () => {
    expect(request(parse('status:failed since:2h train'), NOW)).toEqual({
      statuses: ['failed'], since: '2026-11-17T10:00:00.000Z', text: 'train',
    });
    expect(request(parse('since:nonsense'), NOW)).toEqual({});
  });

  it('matches rows as the server does', () => {
    const row = { name: 'train-7', project: 'p', user: 'ada', status: 'failed', type: 'task', fleet: 'gpu', reason: 'exit 3', submitted_at: '2026-11-17T11:00:00Z' } as RunRow;
    expect(matches(row, {})).toBe(true);
    expect(matches(row, { statuses: ['failed'], users: ['ada'], text: 'TRAIN' })).toBe(true);
    expect(matches(row, { text: 'exit' })).toBe(true);
    expect(matches(row, { statuses: ['done'] })).toBe(false);
    expect(matches(row, { fleets: ['cpu'] })).toBe(false);
    expect(matches(row, { since: '2026-11-17T11:30:00Z' })).toBe(false);
  });
});
