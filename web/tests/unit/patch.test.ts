import { readFileSync } from 'node:fs';
import { describe, expect, it } from 'vitest';
import { fieldsAt, pathTo, valuesOf } from '../../src/lib/schema';
import { applyPatch } from '../../src/text/patch';
import { foldedScale } from '../../src/text/scale';

const TEXT = `# training
type: task
name: train

resources:
  cpu: 8..
  gpu:
    name: H100
    count: 8 # all of them
max_price: 4
`;

describe('patches of cures', () => {
  it('change one value and leave the rest', () => {
    expect(applyPatch(TEXT, { 'resources.gpu.count': 4 })).toBe(TEXT.replace('count: 8 # all of them', 'count: 4'));
    expect(applyPatch(TEXT, { max_price: 12.5 })).toBe(TEXT.replace('max_price: 4', 'max_price: 12.5'));
  });
  it('add what is missing', () => {
    expect(applyPatch(TEXT, { 'resources.gpu.memory': '40GB' })).toContain('    count: 8 # all of them\n    memory: 40GB\nmax_price');
    expect(applyPatch('type: task\n', { 'resources.memory': '16GB' })).toBe('type: task\nresources:\n  memory: 16GB\n');
    expect(applyPatch('type: task\n', { spot_policy: 'auto' })).toBe('type: task\nspot_policy: auto\n');
  });
  it('remove and replace', () => {
    expect(applyPatch(TEXT, { max_price: null })).not.toContain('max_price');
    expect(applyPatch(TEXT, { 'resources.gpu': null })).not.toContain('H100');
    expect(applyPatch('resources:\n  gpu: 2\n', { 'resources.gpu.count': 1 })).toBe('resources:\n  gpu:\n    count: 1\n');
  });
});

describe('completion', () => {
  const schema = {
    oneOf: [
      { properties: { type: { const: 'task' }, commands: { type: 'array' }, resources: { $ref: '#/$defs/resources' } } },
      { properties: { type: { const: 'service' }, port: { type: 'integer' } } },
    ],
    $defs: { resources: { properties: { cpu: { description: 'CPUs' }, spot: { enum: ['auto', 'spot'] }, gpu: { anyOf: [{ type: 'string' }, { properties: { count: {}, name: {} } }] } } } },
  };
  it('knows where a line stands', () => {
    expect(pathTo('resources:\n  gpu:\n    x', 3)).toEqual(['resources', 'gpu']);
    expect(pathTo('a: 1\nb', 2)).toEqual([]);
  });
  it('offers fields of the type and values of a field', () => {
    expect(fieldsAt(schema, 'type: task\n', 2).map((field) => field.name)).toEqual(['type', 'commands', 'resources']);
    expect(fieldsAt(schema, 'type: task\nresources:\n  gpu:\n    ', 4).map((field) => field.name)).toEqual(['count', 'name']);
    expect(valuesOf(schema, 'type: task\nresources:\n  spot: ', 3, 'spot')).toEqual(['auto', 'spot']);
    expect(valuesOf(schema, 'type: ', 1, 'type')).toEqual(['task', 'service']);
  });
});

describe('completion from the schema of the repository', () => {
  const schema = JSON.parse(readFileSync(new URL('../../../schema/windlass.schema.json', import.meta.url), 'utf8')) as Record<string, unknown>;
  it('knows types, fields and resources', () => {
    expect(valuesOf(schema, 'type: ', 1, 'type')).toEqual(expect.arrayContaining(['task', 'service', 'dev-environment', 'fleet']));
    expect(fieldsAt(schema, 'type: task\n', 2).map((field) => field.name)).toEqual(expect.arrayContaining(['commands', 'image', 'resources']));
    expect(fieldsAt(schema, 'type: task\nresources:\n  ', 3).map((field) => field.name)).toEqual(expect.arrayContaining(['cpu', 'memory', 'gpu']));
  });
});

describe('folded times', () => {
  it('grow from 0 to 1 and give short phases room', () => {
    const scale = foldedScale([0, 1000, 2000, 10_000_000]);
    const places = [0, 500, 1000, 2000, 5_000_000, 10_000_000].map((ms) => scale.at(ms));
    expect(places[0]).toBe(0);
    expect(places.at(-1)).toBe(1);
    for (let i = 1; i < places.length; i++) expect(places[i]).toBeGreaterThan(places[i - 1] ?? 1);
    expect(places[2]).toBeGreaterThan(0.02);
  });
});
