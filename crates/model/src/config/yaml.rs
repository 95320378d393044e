//! YAML or JSON text as one tree: values with their source positions.
//!
//! Owns     the size limits. A configuration is untrusted input, so bytes, depth and nodes are counted while reading,
//!          and the expansion of an alias is counted before it is copied.
//! Why not  serde? It loses positions inside tagged unions, and reports one problem at a time.

use std::collections::{BTreeMap, BTreeSet};

use saphyr_parser::{Event, Marker, Parser, ScalarStyle};

use super::{
    error::{Code, Diagnosis, SourcePos, SourceSpan},
    yaml_scalars::{self, ScalarValue},
};

/// Maximum size of a configuration, in bytes.
pub const BYTES_MAX: usize = 1 << 20;
/// Maximum nesting depth.
pub const DEPTH_MAX: usize = 64;
/// Maximum number of values in one tree, including keys and expanded aliases.
pub const NODES_MAX: usize = 100_000;

/// A value and its position.
#[derive(Clone, Debug, PartialEq)]
pub struct Node {
    pub value: Value,
    pub span: SourceSpan,
}

#[derive(Clone, Debug, PartialEq)]
pub enum Value {
    Null,
    Scalar(Scalar),
    Seq(Vec<Node>),
    Map(Vec<Entry>),
}

/// A scalar: its text, and whether it was written without quotes and so may be a number or a boolean.
#[derive(Clone, Debug, PartialEq)]
pub struct Scalar {
    pub text: String,
    pub plain: bool,
}

impl Scalar {
    pub fn meaning(&self) -> ScalarValue {
        if self.plain { yaml_scalars::resolve_scalar(&self.text) } else { ScalarValue::Str }
    }
}

#[derive(Clone, Debug, PartialEq)]
pub struct Entry {
    pub key: String,
    pub key_span: SourceSpan,
    pub value: Node,
}

impl Node {
    /// Returns the entry of a mapping, by key.
    pub fn entry(&self, key: &str) -> Option<&Entry> {
        match &self.value {
            Value::Map(entries) => entries.iter().find(|entry| entry.key == key),
            Value::Null | Value::Scalar(_) | Value::Seq(_) => None,
        }
    }

    /// Returns the value under `key`, unless it is absent or null.
    pub fn field(&self, key: &str) -> Option<&Self> {
        self.entry(key).map(|entry| &entry.value).filter(|node| node.value != Value::Null)
    }

    /// Returns the position of `key`, or of the whole mapping if the key is absent.
    pub fn key_span(&self, key: &str) -> SourceSpan {
        self.entry(key).map_or(self.span, |entry| entry.key_span)
    }

    /// Counts this value and all values below it.
    fn size(&self) -> usize {
        match &self.value {
            Value::Null | Value::Scalar(_) => 1,
            Value::Seq(items) => 1 + items.iter().map(Self::size).sum::<usize>(),
            Value::Map(entries) => 1 + entries.iter().map(|e| 1 + e.value.size()).sum::<usize>(),
        }
    }

    fn height(&self) -> usize {
        match &self.value {
            Value::Null | Value::Scalar(_) => 0,
            Value::Seq(items) => 1 + items.iter().map(Self::height).max().unwrap_or(0),
            Value::Map(entries) => 1 + entries.iter().map(|e| e.value.height()).max().unwrap_or(0),
        }
    }

    /// Builds a tree from normalised JSON, as clients send it. Its nodes have no position.
    pub fn from_json(json: &serde_json::Value) -> Self {
        let plain = |text: String| Value::Scalar(Scalar { text, plain: true });
        let value = match json {
            serde_json::Value::Null => Value::Null,
            serde_json::Value::Bool(b) => plain(b.to_string()),
            serde_json::Value::Number(n) => plain(json_number(n)),
            serde_json::Value::String(text) => Value::Scalar(Scalar { text: text.clone(), plain: false }),
            serde_json::Value::Array(items) => Value::Seq(items.iter().map(Self::from_json).collect()),
            serde_json::Value::Object(map) => Value::Map(
                map.iter()
                    .map(|(key, value)| Entry {
                        key: key.clone(),
                        key_span: SourceSpan::NONE,
                        value: Self::from_json(value),
                    })
                    .collect(),
            ),
        };
        Self { value, span: SourceSpan::NONE }
    }
}

/// Formats a number so that JSON and YAML 1.1 agree: JSON's `1e3` is a number, YAML 1.1's is not.
fn json_number(n: &serde_json::Number) -> String {
    let text = n.to_string();
    if text.contains(['e', 'E']) { n.as_f64().map_or(text, |n| format!("{n:.1}")) } else { text }
}

/// Reads one YAML document.
pub fn read(text: &str) -> Result<Node, Diagnosis> {
    let text = check_text(text)?;
    let mut reader = Reader { parser: Parser::new_from_str(text), nodes: 0, anchors: BTreeMap::new() };
    reader.document()
}

/// Reads all non-empty YAML documents of a text; the limits apply to all of them together.
pub fn read_all(text: &str) -> Result<Vec<Node>, Diagnosis> {
    let text = check_text(text)?;
    let mut reader = Reader { parser: Parser::new_from_str(text), nodes: 0, anchors: BTreeMap::new() };
    let mut documents = reader.documents(|_| Ok(()))?;
    documents.retain(|document| document.value != Value::Null);
    Ok(documents)
}

/// Reads bytes, which may not be text.
pub fn read_bytes(bytes: &[u8]) -> Result<(&str, Node), Diagnosis> {
    let start = SourceSpan { start: SourcePos { line: 1, column: 1 }, end: SourcePos { line: 1, column: 2 } };
    if bytes.starts_with(&[0xff, 0xfe]) || bytes.starts_with(&[0xfe, 0xff]) {
        let message = "the file is UTF-16; expected UTF-8";
        return Err(Diagnosis::new(Code::UnsupportedYaml, start, message).hint("save it as UTF-8"));
    }
    let text = std::str::from_utf8(bytes).map_err(|error| {
        let line = bytes[..error.valid_up_to()].iter().filter(|b| **b == b'\n').count() + 1;
        let pos = |column| SourcePos { line: number(line), column };
        let span = SourceSpan { start: pos(1), end: pos(2) };
        Diagnosis::new(Code::UnsupportedYaml, span, "the file is not UTF-8 text")
    })?;
    read(text).map(|node| (text, node))
}

/// Checks what can be rejected without parsing.
fn check_text(text: &str) -> Result<&str, Diagnosis> {
    let start = SourceSpan { start: SourcePos { line: 1, column: 1 }, end: SourcePos { line: 1, column: 2 } };
    if text.len() > BYTES_MAX {
        let message = format!("the file has {} bytes; the limit is {BYTES_MAX}", text.len());
        return Err(Diagnosis::new(Code::TooLarge, start, message));
    }
    let text = text.strip_prefix('\u{feff}').unwrap_or(text);
    if let Some(at) = text.find('\0') {
        let line = text[..at].matches('\n').count() + 1;
        let column = text[..at].rsplit('\n').next().map_or(0, |tail| tail.chars().count()) + 1;
        let start = SourcePos { line: number(line), column: number(column) };
        let span = SourceSpan { start, end: SourcePos { column: start.column + 1, ..start } };
        let message = "the file contains a NUL character; expected UTF-8 text";
        return Err(Diagnosis::new(Code::UnsupportedYaml, span, message));
    }
    Ok(text)
}

fn number(n: usize) -> u32 {
    u32::try_from(n).unwrap_or(u32::MAX)
}

fn pos(mark: Marker) -> SourcePos {
    SourcePos { line: number(mark.line()), column: number(mark.col()).saturating_add(1) }
}

fn span(span: saphyr_parser::Span) -> SourceSpan {
    SourceSpan { start: pos(span.start), end: pos(span.end) }
}

struct Anchor {
    node: Node,
    size: usize,
    height: usize,
}

struct Reader<'a> {
    parser: Parser<'a, saphyr_parser::StrInput<'a>>,
    nodes: usize,
    anchors: BTreeMap<usize, Anchor>,
}

/// A collection whose end has not been read yet.
enum OpenCollection {
    Seq {
        anchor: usize,
        start: SourceSpan,
        items: Vec<Node>,
    },
    Map {
        anchor: usize,
        start: SourceSpan,
        entries: Vec<Entry>,
        key: Option<(String, SourceSpan)>,
        seen: BTreeMap<String, SourceSpan>,
    },
}

impl Reader<'_> {
    fn next(&mut self) -> Result<(Event<'_>, SourceSpan), Diagnosis> {
        match self.parser.next_event() {
            None => Ok((Event::StreamEnd, SourceSpan::NONE)),
            Some(Ok((event, at))) => Ok((event, span(at))),
            Some(Err(error)) => {
                let start = pos(*error.marker());
                let span = SourceSpan { start, end: SourcePos { column: start.column + 1, ..start } };
                // The parser reads ahead, and may reach its own limit before ours.
                if error.info().contains("recursion limit") {
                    let message = format!("nested deeper than {DEPTH_MAX} levels");
                    return Err(Diagnosis::new(Code::TooLarge, span, message));
                }
                Err(Diagnosis::new(Code::Syntax, span, format!("invalid YAML: {}", error.info())))
            }
        }
    }

    /// Reads the only document of the stream; an empty stream is null.
    fn document(&mut self) -> Result<Node, Diagnosis> {
        let only = |at| {
            let message = "a second document starts here; a file can contain only one configuration";
            Err(Diagnosis::new(Code::UnsupportedYaml, at, message)
                .hint("put each configuration into a separate file"))
        };
        let root = self.documents(only)?.pop();
        let start = SourcePos { line: 1, column: 1 };
        Ok(root.unwrap_or(Node { value: Value::Null, span: SourceSpan { start, end: start } }))
    }

    /// Reads all documents of the stream. `another` is called before each document but the first.
    fn documents(
        &mut self,
        another: impl Fn(SourceSpan) -> Result<(), Diagnosis>,
    ) -> Result<Vec<Node>, Diagnosis> {
        let mut roots = Vec::new();
        loop {
            let (event, at) = self.next()?;
            match event {
                Event::Nothing | Event::StreamStart | Event::DocumentEnd => {}
                Event::DocumentStart(_) => {
                    if !roots.is_empty() {
                        another(at)?;
                    }
                    roots.push(self.tree()?);
                }
                Event::StreamEnd => return Ok(roots),
                Event::Alias(_)
                | Event::Scalar(..)
                | Event::SequenceStart(..)
                | Event::SequenceEnd
                | Event::MappingStart(..)
                | Event::MappingEnd => {
                    return Err(Diagnosis::new(Code::Syntax, at, "invalid YAML: text outside the document"));
                }
            }
        }
    }

    /// Reads one value with all values below it. Uses an explicit stack, so that depth is a count and not a stack
    /// overflow.
    fn tree(&mut self) -> Result<Node, Diagnosis> {
        let mut stack: Vec<OpenCollection> = Vec::new();
        loop {
            let (event, at) = self.next()?;
            let (done, anchor) = match event {
                Event::Scalar(text, style, anchor, tag) => {
                    let text = text.into_owned();
                    refuse_tag(tag.is_some(), at)?;
                    (scalar_node(text, style, at), anchor)
                }
                Event::Alias(id) => (self.expand(id, at, stack.len())?, 0),
                Event::SequenceStart(anchor, tag) => {
                    refuse_tag(tag.is_some(), at)?;
                    refuse_collection_key(&stack, at)?;
                    stack.push(OpenCollection::Seq { anchor, start: at, items: Vec::new() });
                    self.count(1, stack.len(), at)?;
                    continue;
                }
                Event::MappingStart(anchor, tag) => {
                    refuse_tag(tag.is_some(), at)?;
                    refuse_collection_key(&stack, at)?;
                    let (entries, key, seen) = (Vec::new(), None, BTreeMap::new());
                    stack.push(OpenCollection::Map { anchor, start: at, entries, key, seen });
                    self.count(1, stack.len(), at)?;
                    continue;
                }
                Event::SequenceEnd | Event::MappingEnd => match stack.pop() {
                    Some(open) => self.close(open, at)?,
                    None => return Err(Diagnosis::new(Code::Syntax, at, "invalid YAML: unexpected end")),
                },
                Event::Nothing => continue,
                Event::StreamStart | Event::StreamEnd | Event::DocumentStart(_) | Event::DocumentEnd => {
                    return Err(Diagnosis::new(Code::Syntax, at, "invalid YAML: the document ends early"));
                }
            };
            self.count(usize::from(!matches!(done.value, Value::Seq(_) | Value::Map(_))), stack.len(), at)?;
            if anchor > 0 {
                let (size, height) = (done.size(), done.height());
                self.anchors.insert(anchor, Anchor { node: done.clone(), size, height });
                self.count(size, stack.len(), at)?;
            }
            match stack.last_mut() {
                None => return Ok(done),
                Some(open) => insert_value(open, done)?,
            }
        }
    }

    fn count(&mut self, nodes: usize, depth: usize, at: SourceSpan) -> Result<(), Diagnosis> {
        self.nodes = self.nodes.saturating_add(nodes);
        if depth > DEPTH_MAX {
            let message = format!("nested deeper than {DEPTH_MAX} levels");
            return Err(Diagnosis::new(Code::TooLarge, at, message));
        }
        if self.nodes > NODES_MAX {
            let message = format!("more than {NODES_MAX} values, including those that aliases expand to");
            return Err(Diagnosis::new(Code::TooLarge, at, message));
        }
        Ok(())
    }

    fn expand(&mut self, id: usize, at: SourceSpan, depth: usize) -> Result<Node, Diagnosis> {
        let Some(anchor) = self.anchors.get(&id) else {
            return Err(Diagnosis::new(Code::Syntax, at, "an alias refers to a value that contains it"));
        };
        let (size, height) = (anchor.size, anchor.height);
        self.count(size, depth + height, at)?;
        let mut node = self.anchors[&id].node.clone();
        node.span = at;
        Ok(node)
    }

    fn close(&self, open: OpenCollection, at: SourceSpan) -> Result<(Node, usize), Diagnosis> {
        match open {
            OpenCollection::Seq { anchor, start, items } => {
                let end = items.last().map_or(at.end, |item| item.span.end);
                Ok((Node { value: Value::Seq(items), span: SourceSpan { start: start.start, end } }, anchor))
            }
            OpenCollection::Map { anchor, start, entries, key: _, seen: _ } => {
                let end = entries.last().map_or(at.end, |entry| entry.value.span.end);
                let entries = merge(entries)?;
                Ok((
                    Node { value: Value::Map(entries), span: SourceSpan { start: start.start, end } },
                    anchor,
                ))
            }
        }
    }
}

fn scalar_node(text: String, style: ScalarStyle, span: SourceSpan) -> Node {
    let plain = style == ScalarStyle::Plain;
    if plain && yaml_scalars::resolve_scalar(&text) == ScalarValue::Null {
        return Node { value: Value::Null, span };
    }
    Node { value: Value::Scalar(Scalar { text, plain }), span }
}

/// Inserts a finished value into the enclosing collection: as an item, a key or the value of a key.
fn insert_value(open: &mut OpenCollection, done: Node) -> Result<(), Diagnosis> {
    match open {
        OpenCollection::Seq { items, .. } => items.push(done),
        OpenCollection::Map { entries, key, seen, .. } => match key.take() {
            Some((key, key_span)) => entries.push(Entry { key, key_span, value: done }),
            None => {
                let text = match done.value {
                    Value::Scalar(scalar) => scalar.text,
                    Value::Null => "null".to_owned(),
                    Value::Seq(_) | Value::Map(_) => {
                        return Err(Diagnosis::new(
                            Code::UnsupportedYaml,
                            done.span,
                            "a key must be a string",
                        ));
                    }
                };
                if let Some(first) = seen.insert(text.clone(), done.span) {
                    let message = format!("duplicate key `{text}`");
                    let hint =
                        format!("first used at line {}, column {}", first.start.line, first.start.column);
                    return Err(Diagnosis::new(Code::DuplicateKey, done.span, message).at(text).hint(hint));
                }
                *key = Some((text, done.span));
            }
        },
    }
    Ok(())
}

fn refuse_tag(tagged: bool, at: SourceSpan) -> Result<(), Diagnosis> {
    if tagged {
        let message = "YAML tags (`!…`) are not supported";
        return Err(Diagnosis::new(Code::UnsupportedYaml, at, message)
            .hint("remove the tag; quote a value to make it a string"));
    }
    Ok(())
}

fn refuse_collection_key(stack: &[OpenCollection], at: SourceSpan) -> Result<(), Diagnosis> {
    match stack.last() {
        Some(OpenCollection::Map { key: None, .. }) => {
            Err(Diagnosis::new(Code::UnsupportedYaml, at, "a key must be a string, not a list or a mapping"))
        }
        Some(OpenCollection::Map { key: Some(_), .. } | OpenCollection::Seq { .. }) | None => Ok(()),
    }
}

/// Resolves merge keys (`<<: *defaults`): merged entries do not replace explicit ones.
fn merge(entries: Vec<Entry>) -> Result<Vec<Entry>, Diagnosis> {
    if entries.iter().all(|entry| entry.key != "<<") {
        return Ok(entries);
    }
    let (merges, mut merged): (Vec<_>, Vec<_>) = entries.into_iter().partition(|entry| entry.key == "<<");
    let mut present: BTreeSet<String> = merged.iter().map(|entry| entry.key.clone()).collect();
    for entry in merges {
        let (value, at) = (entry.value.value, entry.value.span);
        let sources = match value {
            Value::Seq(items) => items,
            value @ (Value::Map(_) | Value::Null | Value::Scalar(_)) => vec![Node { value, span: at }],
        };
        for source in sources {
            let Value::Map(brought) = source.value else {
                let message = "`<<` requires a mapping or a list of mappings";
                return Err(Diagnosis::new(Code::WrongType, source.span, message).at("<<"));
            };
            for entry in brought {
                if present.insert(entry.key.clone()) {
                    merged.push(entry);
                }
            }
        }
    }
    Ok(merged)
}
