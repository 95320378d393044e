//! The texts of the product: every string that users or operators can see, with its location, and every name and doc
//! comment.
//!
//! `cargo xtask texts` prints the strings for review; [`crate::tidy`] checks the words in all of them. Sources are read
//! as tokens, so that comments, names and literals cannot be confused.

use std::fmt;

use anyhow::{Context, Result};
use proc_macro2::{Delimiter, Group, Literal, TokenStream, TokenTree};

use crate::{args::Args, output, workspace::Workspace};

/// The kind of a text, by where it appears.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// `--help` of a command or an option.
    Help,
    /// Description of a configuration field, in the JSON Schema and the reference.
    Schema,
    /// `Display` of an error type.
    Error,
    /// A `tracing` event.
    Log,
    /// Any other string literal with words in it: messages, hints, tables.
    Message,
    /// A doc comment that only developers read.
    Doc,
    /// Name of a type or a module.
    Name,
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Help => "help",
            Self::Schema => "schema",
            Self::Error => "error",
            Self::Log => "log",
            Self::Message => "message",
            Self::Doc => "doc",
            Self::Name => "name",
        })
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Text {
    pub(crate) path: String,
    pub(crate) line: usize,
    pub(crate) kind: Kind,
    pub(crate) text: String,
}

/// Macros whose literals no user sees.
const INTERNAL_MACROS: &[&str] = &[
    "assert",
    "assert_eq",
    "assert_ne",
    "debug_assert",
    "debug_assert_eq",
    "debug_assert_ne",
    "panic",
    "unreachable",
    "env",
    "include_str",
    "include_bytes",
    "concat",
    "cfg",
    "matches",
];
const LOG_MACROS: &[&str] = &["trace", "debug", "info", "warn", "error", "event"];
const CLI_DERIVES: &[&str] = &["Parser", "Args", "Subcommand", "ValueEnum"];
/// Macros that define configuration types: their doc comments are the descriptions of fields.
const SCHEMA_MACROS: &[&str] = &["table"];

/// `cargo xtask texts [WORD]`: prints all texts that users or operators see, or those that contain the word.
pub(crate) fn run(workspace: &Workspace, mut args: Args) -> Result<()> {
    let word = args.word();
    args.finish()?;
    let visible = |text: &Text| !matches!(text.kind, Kind::Doc | Kind::Name);
    let wanted = |text: &Text| word.as_ref().is_none_or(|word| text.text.contains(word.as_str()));
    for text in product(workspace)?.iter().filter(|text| visible(text) && wanted(text)) {
        output::print_result(&format!(
            "{}:{} {}: {}",
            text.path,
            text.line,
            text.kind,
            text.text.replace('\n', "⏎")
        ));
    }
    Ok(())
}

/// Returns all texts of the product crates.
pub(crate) fn product(workspace: &Workspace) -> Result<Vec<Text>> {
    let test_crates = crate::workspace::TEST_CRATES;
    let is_product = |path: &String| {
        path.ends_with(".rs")
            && path.starts_with("crates/")
            && path.contains("/src/")
            && !test_crates.iter().any(|dir| path.starts_with(dir))
            && !path.starts_with("crates/planted-bugs/")
    };
    let mut texts = Vec::new();
    for path in workspace.files()?.into_iter().filter(is_product) {
        texts.extend(of_source(&path, &workspace.read(&path)?)?);
    }
    Ok(texts)
}

/// Returns the texts of one source file, without those of its `#[cfg(test)]` items.
pub(crate) fn of_source(path: &str, source: &str) -> Result<Vec<Text>> {
    let tokens: TokenStream = source.parse().ok().with_context(|| format!("failed to parse `{path}`"))?;
    let mut reader = Reader { path, texts: Vec::new() };
    // SQL is not prose.
    let literals = (!path.contains("/src/db/")).then_some(Kind::Message);
    reader.read(tokens, TextKinds { docs: Kind::Doc, literals });
    Ok(reader.texts)
}

/// Returns every identifier of a source file with its line, tests included.
pub(crate) fn identifiers(path: &str, source: &str) -> Result<Vec<(usize, String)>> {
    fn collect(tokens: TokenStream, found: &mut Vec<(usize, String)>) {
        for token in tokens {
            match token {
                TokenTree::Ident(ident) => found.push((ident.span().start().line, ident.to_string())),
                TokenTree::Group(group) => collect(group.stream(), found),
                TokenTree::Punct(_) | TokenTree::Literal(_) => {}
            }
        }
    }
    let tokens: TokenStream = source.parse().ok().with_context(|| format!("failed to parse `{path}`"))?;
    let mut found = Vec::new();
    collect(tokens, &mut found);
    Ok(found)
}

/// The kinds of doc comments and literals in the current context.
#[derive(Clone, Copy)]
struct TextKinds {
    docs: Kind,
    /// `None` where literals are not visible to users.
    literals: Option<Kind>,
}

struct Reader<'a> {
    path: &'a str,
    texts: Vec<Text>,
}

impl Reader<'_> {
    fn read(&mut self, tokens: TokenStream, around: TextKinds) {
        let tokens: Vec<TokenTree> = tokens.into_iter().collect();
        let mut docs = around.docs;
        let mut at = 0;
        while let Some(token) = tokens.get(at) {
            at += 1;
            match token {
                TokenTree::Punct(punct) if punct.as_char() == '#' => {
                    if let Some(TokenTree::Punct(bang)) = tokens.get(at)
                        && bang.as_char() == '!'
                    {
                        at += 1;
                    }
                    if let Some(TokenTree::Group(group)) = tokens.get(at) {
                        at += 1;
                        match self.attribute(group, docs) {
                            Attribute::Test => at = skip_item(&tokens, at),
                            Attribute::Docs(kind) => docs = kind,
                            Attribute::Other => {}
                        }
                    }
                }
                TokenTree::Ident(ident) => {
                    let name = ident.to_string();
                    match (tokens.get(at), tokens.get(at + 1)) {
                        (Some(TokenTree::Ident(defined)), _)
                            if ["struct", "enum", "trait", "type", "union"].contains(&name.as_str()) =>
                        {
                            self.push(defined.span().start().line, Kind::Name, defined.to_string());
                        }
                        (Some(TokenTree::Punct(bang)), Some(TokenTree::Group(group)))
                            if bang.as_char() == '!' =>
                        {
                            at += 2;
                            self.read(group.stream(), inside_macro(&name, TextKinds { docs, ..around }));
                        }
                        _ => {}
                    }
                }
                TokenTree::Literal(literal) => {
                    if let Some(kind) = around.literals {
                        self.literal(literal, kind);
                    }
                }
                TokenTree::Group(group) => {
                    self.read(group.stream(), TextKinds { docs, ..around });
                    if group.delimiter() == Delimiter::Brace {
                        docs = around.docs;
                    }
                }
                TokenTree::Punct(punct) if punct.as_char() == ';' => docs = around.docs,
                TokenTree::Punct(_) => {}
            }
        }
    }

    fn attribute(&mut self, group: &Group, docs: Kind) -> Attribute {
        let tokens: Vec<TokenTree> = group.stream().into_iter().collect();
        let Some(TokenTree::Ident(name)) = tokens.first() else { return Attribute::Other };
        match (name.to_string().as_str(), tokens.last()) {
            ("doc", Some(TokenTree::Literal(literal))) => {
                self.literal(literal, docs);
                Attribute::Other
            }
            ("cfg", Some(TokenTree::Group(of)))
                if words(of).iter().any(|word| word == "test" || word == "testing") =>
            {
                Attribute::Test
            }
            ("test", _) => Attribute::Test,
            ("error", Some(TokenTree::Group(of))) => {
                self.read(of.stream(), TextKinds { docs, literals: Some(Kind::Error) });
                Attribute::Other
            }
            ("derive", Some(TokenTree::Group(of))) => {
                let derives = words(of);
                if derives.iter().any(|name| CLI_DERIVES.contains(&name.as_str())) {
                    Attribute::Docs(Kind::Help)
                } else if derives.iter().any(|name| name == "JsonSchema") {
                    Attribute::Docs(Kind::Schema)
                } else {
                    Attribute::Other
                }
            }
            ("arg" | "command", Some(TokenTree::Group(of))) => {
                self.read(of.stream(), TextKinds { docs, literals: Some(Kind::Help) });
                Attribute::Other
            }
            _ => Attribute::Other,
        }
    }

    fn literal(&mut self, literal: &Literal, kind: Kind) {
        let text = unquoted(&literal.to_string());
        let is_prose =
            text.split_whitespace().filter(|word| word.chars().any(char::is_alphabetic)).count() > 1;
        if kind == Kind::Doc || kind == Kind::Help || is_prose {
            self.push(literal.span().start().line, kind, text.trim().to_owned());
        }
    }

    fn push(&mut self, line: usize, kind: Kind, text: String) {
        self.texts.push(Text { path: self.path.to_owned(), line, kind, text });
    }
}

enum Attribute {
    /// The item is compiled only for tests.
    Test,
    /// Doc comments of the item are of this kind.
    Docs(Kind),
    Other,
}

fn inside_macro(name: &str, around: TextKinds) -> TextKinds {
    if LOG_MACROS.contains(&name) {
        TextKinds { literals: Some(Kind::Log), ..around }
    } else if INTERNAL_MACROS.contains(&name) {
        TextKinds { literals: None, ..around }
    } else if SCHEMA_MACROS.contains(&name) {
        TextKinds { docs: Kind::Schema, ..around }
    } else {
        around
    }
}

/// Returns the index after the item at `at`: after its braces or its semicolon.
fn skip_item(tokens: &[TokenTree], at: usize) -> usize {
    let ends = |token: &TokenTree| match token {
        TokenTree::Group(group) => group.delimiter() == Delimiter::Brace,
        TokenTree::Punct(punct) => punct.as_char() == ';' || punct.as_char() == ',',
        TokenTree::Ident(_) | TokenTree::Literal(_) => false,
    };
    tokens.iter().skip(at).position(ends).map_or(tokens.len(), |ahead| at + ahead + 1)
}

fn words(group: &Group) -> Vec<String> {
    let idents = group.stream().into_iter().filter_map(|token| match token {
        TokenTree::Ident(ident) => Some(vec![ident.to_string()]),
        TokenTree::Group(inner) => Some(words(&inner)),
        TokenTree::Punct(_) | TokenTree::Literal(_) => None,
    });
    idents.flatten().collect()
}

/// Returns the text of a string literal as it is printed; empty for other literals.
fn unquoted(literal: &str) -> String {
    if let Some(raw) = literal.strip_prefix('r') {
        let inner = raw.trim_matches('#');
        return inner
            .strip_prefix('"')
            .and_then(|rest| rest.strip_suffix('"'))
            .unwrap_or_default()
            .to_owned();
    }
    let Some(inner) = literal.strip_prefix('"').and_then(|rest| rest.strip_suffix('"')) else {
        return String::new();
    };
    let mut text = String::new();
    let mut chars = inner.chars().peekable();
    while let Some(char) = chars.next() {
        match (char, chars.peek()) {
            ('\\', Some('\n')) => while chars.next_if(|next| next.is_whitespace()).is_some() {},
            ('\\', Some('n')) => {
                chars.next();
                text.push('\n');
            }
            ('\\', Some(&escaped)) => {
                chars.next();
                text.push(escaped);
            }
            _ => text.push(char),
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn texts_are_found_with_their_kind_and_line() {
        let source = r##"
            //! A module.
            #[derive(Debug, thiserror::Error)]
            enum Broken {
                #[error("read `{path}`")]
                Read { path: String },
            }
            /// Shows things.
            #[derive(clap::Args)]
            struct Options {
                /// How many
                count: u32,
            }
            fn f() {
                tracing::warn!(error = 1, "failed to read it");
                assert!(true, "never shown to users");
                say(format!("found {} of \"them\"", 1));
                let id = "word";
            }
            #[cfg(test)]
            mod tests {
                fn g() { say("only in tests"); }
            }
        "##;
        let found: Vec<_> = of_source("crates/x/src/a.rs", source)
            .unwrap()
            .into_iter()
            .map(|text| format!("{} {}: {}", text.line, text.kind, text.text))
            .collect();
        assert_eq!(
            found,
            [
                "2 doc: A module.",
                "4 name: Broken",
                "5 error: read `{path}`",
                "8 doc: Shows things.",
                "10 name: Options",
                "11 help: How many",
                "15 log: failed to read it",
                "17 message: found {} of \"them\"",
            ]
        );
    }
}
