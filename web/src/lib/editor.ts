/** The editor of configurations. Loaded when it is opened; lives in a shadow root, where its style sheets are allowed. */
import { autocompletion, completionKeymap, type Completion, type CompletionContext, type CompletionResult } from '@codemirror/autocomplete';
import { defaultKeymap, history, historyKeymap, indentWithTab } from '@codemirror/commands';
import { yaml } from '@codemirror/lang-yaml';
import { defaultHighlightStyle, HighlightStyle, indentUnit, syntaxHighlighting } from '@codemirror/language';
import { lintGutter, setDiagnostics, type Diagnostic } from '@codemirror/lint';
import { Compartment, EditorState } from '@codemirror/state';
import { drawSelection, EditorView, highlightActiveLine, keymap, lineNumbers } from '@codemirror/view';
import { tags } from '@lezer/highlight';
import type { Document, Problem } from '../api/api';
import { fieldsAt, valuesOf } from './schema';

const colors = HighlightStyle.define([
  { tag: [tags.propertyName, tags.definition(tags.propertyName)], color: 'var(--accent)' },
  { tag: [tags.comment, tags.lineComment], color: 'var(--muted)', fontStyle: 'italic' },
  { tag: [tags.number, tags.bool, tags.null], color: 'var(--ends)' },
  { tag: tags.string, color: 'var(--runs)' },
]);
const look = EditorView.theme({
  '&': { height: '100%', backgroundColor: 'var(--panel)', color: 'var(--ink)', fontSize: '13px' },
  '&.cm-focused': { outline: 'none' },
  '.cm-scroller': { fontFamily: 'var(--mono)', lineHeight: '21px' },
  '.cm-content': { padding: '10px 0', caretColor: 'var(--ink)' },
  '.cm-cursor': { borderLeftColor: 'var(--ink)' },
  '.cm-gutters': { backgroundColor: 'var(--panel)', color: 'var(--muted)', borderRight: '1px solid var(--hair)' },
  '.cm-activeLine': { backgroundColor: 'color-mix(in srgb, var(--accent) 6%, transparent)' },
  '&.cm-focused .cm-selectionBackground, .cm-selectionBackground': { backgroundColor: 'color-mix(in srgb, var(--accent) 25%, transparent) !important' },
  '.cm-tooltip': { backgroundColor: 'var(--panel)', border: '1px solid var(--line)', borderRadius: '8px', boxShadow: 'var(--shadow)', color: 'var(--ink)' },
  '.cm-tooltip-autocomplete ul li[aria-selected]': { backgroundColor: 'color-mix(in srgb, var(--accent) 16%, var(--panel))', color: 'var(--ink)' },
  '.cm-completionDetail': { color: 'var(--muted)', fontStyle: 'normal' },
  '.cm-diagnostic': { fontFamily: 'var(--sans)', padding: '6px 10px' },
});

export interface Editor {
  set(text: string): void;
  problems(list: Problem[]): void;
  schema(schema: Document): void;
  focus(): void;
  reveal(line: number): void;
  destroy(): void;
}

export function openEditor(host: HTMLElement, text: string, onchange: (text: string) => void, onapply: () => void): Editor {
  const root = host.shadowRoot ?? host.attachShadow({ mode: 'open' });
  const sheet = new CSSStyleSheet();
  sheet.replaceSync(':host { display: block; height: 100% } .root { height: 100% }');
  root.adoptedStyleSheets = [sheet];
  const parent = document.createElement('div');
  parent.className = 'root';
  root.append(parent);
  let schema: Document | null = null;
  const language = new Compartment();

  const view = new EditorView({
    parent,
    root,
    state: EditorState.create({
      doc: text,
      extensions: [
        lineNumbers(), history(), drawSelection(), highlightActiveLine(), lintGutter(), indentUnit.of('  '), language.of(yaml()),
        syntaxHighlighting(colors), syntaxHighlighting(defaultHighlightStyle, { fallback: true }), look,
        autocompletion({ override: [(context) => complete(context, schema)], icons: false }),
        EditorView.contentAttributes.of({ 'aria-label': 'Configuration', 'aria-multiline': 'true', tabindex: '0' }),
        keymap.of([{ key: 'Mod-Enter', run: () => (onapply(), true) }, ...completionKeymap, ...defaultKeymap, ...historyKeymap, indentWithTab]),
        // Typed over a selection, the browser would write a style attribute, which the content policy forbids.
        EditorView.domEventHandlers({
          beforeinput: (event, target) => {
            if (event.inputType !== 'insertText' || event.isComposing || event.data === null || target.state.selection.main.empty) return false;
            event.preventDefault();
            target.dispatch(target.state.replaceSelection(event.data), { userEvent: 'input.type', scrollIntoView: true });
            return true;
          },
        }),
        EditorView.updateListener.of((update) => update.docChanged && onchange(update.state.doc.toString())),
      ],
    }),
  });
  const place = (line: number, column: number) => {
    const { doc } = view.state;
    const at = doc.line(Math.min(Math.max(line, 1), doc.lines));
    return Math.min(at.from + Math.max(column - 1, 0), at.to);
  };
  return {
    set: (next) => view.dispatch({ changes: { from: 0, to: view.state.doc.length, insert: next } }),
    problems: (list) => {
      const found = list.map<Diagnostic>((problem) => ({ from: place(problem.line, problem.column), to: Math.max(place(problem.end_line, problem.end_column), place(problem.line, problem.column)), severity: problem.severity, message: `${problem.message}${problem.hint ? ` — ${problem.hint}` : ''}`, source: problem.code }));
      view.dispatch(setDiagnostics(view.state, found));
    },
    schema: (next) => (schema = next),
    focus: () => view.focus(),
    reveal: (line) => {
      const at = place(line, 1);
      view.dispatch({ selection: { anchor: at }, effects: EditorView.scrollIntoView(at, { y: 'center' }) });
      view.focus();
    },
    destroy: () => {
      view.destroy();
      parent.remove();
    },
  };
}

function complete(context: CompletionContext, schema: Document | null): CompletionResult | null {
  if (!schema) return null;
  const line = context.state.doc.lineAt(context.pos);
  const before = line.text.slice(0, context.pos - line.from);
  const value = /^(\s*)(?:- )?([\w.-]+):\s*([\w.-]*)$/.exec(before);
  const text = context.state.doc.toString();
  if (value) {
    const options = valuesOf(schema, text, line.number, value[2] ?? '');
    return options.length ? { from: context.pos - (value[3] ?? '').length, options: options.map<Completion>((label) => ({ label })) } : null;
  }
  const name = /^\s*(?:- )?([\w.-]*)$/.exec(before);
  if (!name || (!context.explicit && name[1] === '')) return null;
  const options = fieldsAt(schema, text, line.number);
  return { from: context.pos - (name[1] ?? '').length, options: options.map<Completion>((field) => ({ label: field.name, detail: field.detail, apply: `${field.name}: ` })), validFor: /^[\w.-]*$/ };
}
