// Compares the hand-written contract of src/api/api.ts with docs/api/openapi.json: every call has an operation, every field
// that a page sends is known to it and none that it needs is missing, and every field that a page reads is in its answer.
import { readFileSync } from 'node:fs';
import { fileURLToPath } from 'node:url';
import ts from 'typescript';

const ROOT = fileURLToPath(new URL('..', import.meta.url));
const FILE = `${ROOT}src/api/api.ts`;
const DOCUMENT = JSON.parse(readFileSync(`${ROOT}../docs/api/openapi.json`, 'utf8'));
/** Shapes that belong to other documents. */
const OPAQUE = new Set(['Document', 'Patch', 'Record']);
/** Answers that the document describes as one event of a stream, or as bytes. */
const DEPTH_MAX = 8;

const normal = (path) => path.replace(/\{[^}]*\}/g, '{}');
const operations = new Map(Object.entries(DOCUMENT.paths).flatMap(([path, item]) => Object.entries(item).map(([method, operation]) => [`${method} ${normal(path)}`, operation])));
const program = ts.createProgram([FILE], { strict: true, noEmit: true, target: ts.ScriptTarget.ES2022, module: ts.ModuleKind.ESNext, moduleResolution: ts.ModuleResolutionKind.Bundler, lib: ['lib.es2022.d.ts', 'lib.dom.d.ts'], exactOptionalPropertyTypes: true, skipLibCheck: true });
const checker = program.getTypeChecker();
const source = program.getSourceFile(FILE);
const problems = [];
let calls = 0;
let compared = 0;

/** Schemas that a value may have: alternatives, without null. */
function alternatives(schema) {
  if (!schema || schema === true) return [];
  const parts = [...(schema.anyOf ?? []), ...(schema.oneOf ?? []), ...(schema.allOf ?? [])];
  const own = schema.properties || schema.items || schema.additionalProperties || (schema.type && schema.type !== 'null' && parts.length === 0) ? [schema] : [];
  return [...own, ...parts.flatMap(alternatives)].filter((one) => one.type !== 'null');
}
const isOpen = (schemas) => schemas.length === 0 || schemas.some((one) => one.additionalProperties && one.additionalProperties !== false && !one.properties) || schemas.every((one) => one.type === undefined && !one.properties && !one.items) || schemas.every((one) => [one.type].flat().includes('object') && !one.properties);

/** Types that a value may have, without null and undefined. */
const parts = (type) => (type.isUnion() ? type.types : [type]).filter((one) => !(one.flags & (ts.TypeFlags.Null | ts.TypeFlags.Undefined | ts.TypeFlags.Void)));
const nameOf = (type) => type.aliasSymbol?.name ?? type.symbol?.name;

function compareAnswer(type, schema, where, depth = 0) {
  if (depth > DEPTH_MAX) return;
  const schemas = alternatives(schema);
  if (isOpen(schemas)) return;
  for (const part of parts(type)) {
    if (part.flags & (ts.TypeFlags.StringLike | ts.TypeFlags.NumberLike | ts.TypeFlags.BooleanLike | ts.TypeFlags.Any | ts.TypeFlags.Unknown) || OPAQUE.has(nameOf(part))) continue;
    if (checker.isArrayType(part) || checker.isTupleType(part)) {
      const items = schemas.map((one) => one.items).filter(Boolean);
      const of = checker.getTypeArguments(part)[0];
      if (items.length === 0) { if (!schemas.some((one) => one.prefixItems || [one.type].flat().includes('array'))) problems.push(`${where}: is a list for the UI, and none for the server`); } else if (of) compareAnswer(of, { anyOf: items }, `${where}[]`, depth + 1);
      continue;
    }
    const index = checker.getIndexInfoOfType(part, ts.IndexKind.String);
    if (index) continue;
    for (const property of checker.getPropertiesOfType(part)) {
      const found = schemas.map((one) => one.properties?.[property.name]).filter(Boolean);
      compared++;
      if (found.length === 0) problems.push(`${where}.${property.name}: the server does not answer it`);
      else compareAnswer(checker.getTypeOfSymbolAtLocation(property, source), { anyOf: found }, `${where}.${property.name}`, depth + 1);
    }
  }
}

function compareBody(type, schema, where) {
  const schemas = alternatives(schema);
  if (isOpen(schemas)) return;
  const sent = parts(type);
  const known = new Set(schemas.flatMap((one) => Object.keys(one.properties ?? {})));
  for (const part of sent) {
    const names = new Set(checker.getPropertiesOfType(part).map((property) => property.name));
    for (const name of names) {
      compared++;
      if (!known.has(name)) problems.push(`${where}: sends \`${name}\`, which the server does not know`);
    }
    const required = schemas.length === 1 ? (schemas[0].required ?? []) : [];
    for (const name of required) if (!names.has(name)) problems.push(`${where}: does not send \`${name}\`, which the server needs`);
  }
}

/** The path of a call, with `{}` for its parameters; null if it is no text. */
function pathOf(node) {
  if (ts.isStringLiteralLike(node)) return node.text;
  if (ts.isTemplateExpression(node)) return node.head.text + node.templateSpans.map((span) => `{}${span.literal.text}`).join('');
  return null;
}

function visit(node) {
  if (ts.isCallExpression(node) && ts.isIdentifier(node.expression) && ['call', 'fetchRows', 'query'].includes(node.expression.text)) {
    const kind = node.expression.text;
    const path = pathOf(node.arguments[0]);
    if (path?.startsWith('/api/')) {
      calls++;
      const where = `${kind === 'query' ? 'GET' : 'POST'} ${path}`;
      const operation = operations.get(`${kind === 'query' ? 'get' : 'post'} ${path}`);
      if (!operation) problems.push(`${where}: the server has no such operation`);
      else if (kind === 'query') {
        const known = new Set((operation.parameters ?? []).filter((one) => one.in === 'query').map((one) => one.name));
        const sent = checker.getPropertiesOfType(checker.getTypeAtLocation(node.arguments[1])).map((property) => property.name);
        for (const name of sent) if (known.size && !known.has(name)) problems.push(`${where}: sends \`${name}\`, which the server does not know`);
      } else {
        const body = node.arguments[kind === 'fetchRows' ? 2 : 1];
        const request = operation.requestBody?.content?.['application/json']?.schema;
        if (request && body) compareBody(checker.getTypeAtLocation(body), request, where);
        const answer = operation.responses['200']?.content?.['application/json']?.schema;
        let type = checker.getTypeFromTypeNode(node.typeArguments[0]);
        if (kind === 'fetchRows') {
          // `Rows<Row>`: the rows are compared one by one.
          const row = alternatives(answer).map((one) => one.properties?.rows?.items).find(Boolean);
          if (row) compareAnswer(type, row, `${where}.rows[]`);
        } else if (answer) compareAnswer(type, answer, where);
      }
    }
  }
  ts.forEachChild(node, visit);
}
visit(source);

if (calls < 80) problems.push(`only ${calls} calls were found in src/api/api.ts`);
if (problems.length) {
  console.error(`${problems.join('\n')}\n${problems.length} differences between src/api/api.ts and docs/api/openapi.json`);
  process.exit(1);
}
console.log(`${calls} calls and ${compared} fields agree with docs/api/openapi.json`);
