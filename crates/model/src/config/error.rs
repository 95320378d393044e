//! Problems of a configuration: the code, the position and a hint.
//!
//! Codes are stable: they are printed, linked and matched by scripts. A retired code is not reused.
//!
//! | code | name | meaning |
//! | --- | --- | --- |
//! | C001 | syntax | the text is not YAML |
//! | C002 | too-large | a limit of the reader is exceeded: bytes, depth or nodes |
//! | C003 | duplicate-key | one mapping has the same key twice |
//! | C004 | unsupported-yaml | YAML that is rejected on purpose: tags, several documents, UTF-16 |
//! | C010 | unknown-type | `type` is missing or names no kind of configuration |
//! | C011 | unknown-field | a key that this kind of configuration does not have |
//! | C012 | missing-field | a required key is absent |
//! | C013 | wrong-type | a list where text is expected, and similar |
//! | C014 | invalid-value | the right type, but not a valid value |
//! | C015 | out-of-range | a number or a length outside its bounds |
//! | C016 | conflict | two settings that exclude or contradict each other |
//! | C017 | unsupported | valid elsewhere, deliberately not part of windlass |
//! | C018 | interpolation | a `${{ … }}` that cannot be parsed or is not allowed there |

use std::fmt::{self, Write as _};

use serde::{Serialize, Serializer, ser::SerializeMap as _};

/// Kind of a problem. See the table at the head of this module.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Code {
    Syntax,
    TooLarge,
    DuplicateKey,
    UnsupportedYaml,
    UnknownType,
    UnknownField,
    MissingField,
    WrongType,
    InvalidValue,
    OutOfRange,
    Conflict,
    Unsupported,
    Interpolation,
}

impl Code {
    pub const ALL: [Self; 13] = [
        Self::Syntax,
        Self::TooLarge,
        Self::DuplicateKey,
        Self::UnsupportedYaml,
        Self::UnknownType,
        Self::UnknownField,
        Self::MissingField,
        Self::WrongType,
        Self::InvalidValue,
        Self::OutOfRange,
        Self::Conflict,
        Self::Unsupported,
        Self::Interpolation,
    ];

    /// Returns the code that is printed and matched, such as `C011`.
    pub const fn id(self) -> &'static str {
        match self {
            Self::Syntax => "C001",
            Self::TooLarge => "C002",
            Self::DuplicateKey => "C003",
            Self::UnsupportedYaml => "C004",
            Self::UnknownType => "C010",
            Self::UnknownField => "C011",
            Self::MissingField => "C012",
            Self::WrongType => "C013",
            Self::InvalidValue => "C014",
            Self::OutOfRange => "C015",
            Self::Conflict => "C016",
            Self::Unsupported => "C017",
            Self::Interpolation => "C018",
        }
    }

    /// Returns the readable name, such as `unknown-field`.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Syntax => "syntax",
            Self::TooLarge => "too-large",
            Self::DuplicateKey => "duplicate-key",
            Self::UnsupportedYaml => "unsupported-yaml",
            Self::UnknownType => "unknown-type",
            Self::UnknownField => "unknown-field",
            Self::MissingField => "missing-field",
            Self::WrongType => "wrong-type",
            Self::InvalidValue => "invalid-value",
            Self::OutOfRange => "out-of-range",
            Self::Conflict => "conflict",
            Self::Unsupported => "unsupported",
            Self::Interpolation => "interpolation",
        }
    }
}

/// Position in the source: lines and columns start at 1 and count characters. Line 0 means "no source".
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize)]
pub struct SourcePos {
    pub line: u32,
    pub column: u32,
}

/// Range of positions from `start` up to, not including, `end`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SourceSpan {
    pub start: SourcePos,
    pub end: SourcePos,
}

impl SourceSpan {
    /// Span of a value from JSON or from code, which has no position.
    pub const NONE: Self =
        Self { start: SourcePos { line: 0, column: 0 }, end: SourcePos { line: 0, column: 0 } };

    pub const fn is_known(self) -> bool {
        self.start.line > 0
    }
}

/// One problem: what is wrong, the position, and a hint.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Diagnosis {
    pub code: Code,
    pub message: String,
    /// Path of the field, such as `resources.gpu.count` or `groups[1].commands`; empty for the whole file.
    pub path: String,
    pub span: SourceSpan,
    pub hint: Option<String>,
}

impl Diagnosis {
    pub fn new(code: Code, span: SourceSpan, message: impl Into<String>) -> Self {
        Self { code, message: message.into(), path: String::new(), span, hint: None }
    }

    #[must_use]
    pub fn hint(mut self, hint: impl Into<String>) -> Self {
        self.hint = Some(hint.into());
        self
    }

    #[must_use]
    pub fn at(mut self, path: impl Into<String>) -> Self {
        self.path = path.into();
        self
    }

    /// Renders the problem for a terminal, with the source line and a caret below the position.
    pub fn render(&self, file: &str, source: &str) -> String {
        let mut out = format!("error[{}]: {}\n", self.code.id(), self.message);
        let SourcePos { line, column } = self.span.start;
        let text = self.span.is_known().then(|| source_line(source, line)).flatten();
        if self.span.is_known() {
            let gutter = " ".repeat(line.to_string().len());
            let _ = writeln!(out, "{gutter}--> {file}:{line}:{column}");
            if let Some(text) = text {
                let (shown, lead, width) = underline(text, self.span);
                let _ = writeln!(out, "{gutter} |");
                let _ = writeln!(out, "{line} | {shown}");
                let _ = writeln!(out, "{gutter} | {}{}", " ".repeat(lead), "^".repeat(width));
            }
        } else {
            let _ = writeln!(out, " --> {file}");
        }
        if let Some(hint) = &self.hint {
            let _ = writeln!(out, "  = hint: {hint}");
        }
        out
    }
}

/// Prints one line, for messages without a source to show: `resources.gpu: unknown field `cout``.
impl fmt::Display for Diagnosis {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.path.is_empty() {
            f.write_str(&self.message)
        } else {
            write!(f, "{}: {}", self.path, self.message)
        }
    }
}

impl Serialize for Diagnosis {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut map = serializer.serialize_map(None)?;
        map.serialize_entry("code", self.code.id())?;
        map.serialize_entry("kind", self.code.name())?;
        map.serialize_entry("message", &self.message)?;
        map.serialize_entry("path", &self.path)?;
        let known = self.span.is_known();
        map.serialize_entry("line", &known.then_some(self.span.start.line))?;
        map.serialize_entry("column", &known.then_some(self.span.start.column))?;
        map.serialize_entry("end_line", &known.then_some(self.span.end.line))?;
        map.serialize_entry("end_column", &known.then_some(self.span.end.column))?;
        map.serialize_entry("hint", &self.hint)?;
        map.end()
    }
}

/// Joins the problems into one line, for errors that are sent without their source.
pub fn summary(problems: &[Diagnosis]) -> String {
    problems.iter().map(ToString::to_string).collect::<Vec<_>>().join("; ")
}

fn source_line(source: &str, line: u32) -> Option<&str> {
    let source = source.strip_prefix('\u{feff}').unwrap_or(source);
    let index = usize::try_from(line).ok()?.checked_sub(1)?;
    source.split('\n').nth(index).map(|text| text.trim_end_matches('\r'))
}

/// Maximum number of characters shown of a source line; a one-line megabyte must not fill a terminal.
const SHOWN_CHARS_MAX: usize = 160;

/// Returns the line with tabs expanded to four columns, the start of the caret and its width.
fn underline(text: &str, span: SourceSpan) -> (String, usize, usize) {
    let from = usize::try_from(span.start.column).unwrap_or(1).saturating_sub(1);
    let visible = text.trim_end().chars().count();
    let to = if span.end.line == span.start.line {
        usize::try_from(span.end.column).unwrap_or(1).saturating_sub(1).min(visible)
    } else {
        visible
    };
    let skip = from.saturating_sub(SHOWN_CHARS_MAX / 2);
    let (mut shown, mut lead, mut width) = (String::new(), 0, 0);
    if skip > 0 {
        shown.push('…');
        lead = 1;
    }
    for (index, c) in text.chars().enumerate().skip(skip).take(SHOWN_CHARS_MAX) {
        let columns = columns_of(c);
        if index < from {
            lead += columns;
        } else if index < to {
            width += columns;
        }
        match c {
            '\t' => shown.push_str("    "),
            c if c.is_control() => shown.push('\u{fffd}'),
            c => shown.push(c),
        }
    }
    (shown.trim_end().to_owned(), lead, width.max(1))
}

/// Returns the terminal columns of a character: enough of Unicode's width tables to align carets.
fn columns_of(c: char) -> usize {
    match u32::from(c) {
        0x09 => 4,
        0x0300..=0x036f | 0x200b..=0x200f | 0x20d0..=0x20ff | 0xfe00..=0xfe0f => 0,
        0x1100..=0x115f
        | 0x2e80..=0x303e
        | 0x3041..=0xa4cf
        | 0xac00..=0xd7a3
        | 0xf900..=0xfaff
        | 0xfe30..=0xfe6f
        | 0xff00..=0xff60
        | 0xffe0..=0xffe6
        | 0x1f300..=0x1f64f
        | 0x1f680..=0x1f6ff
        | 0x1f900..=0x1f9ff
        | 0x20000..=0x3fffd => 2,
        _ => 1,
    }
}
