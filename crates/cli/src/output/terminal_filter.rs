//! Protects the terminal from control sequences in untrusted text.
//!
//! Names and messages are short: [`printable`] shows every control character in them. Output of jobs is a stream of
//! bytes in chunks of any size: a [`Filter`] passes text, line breaks, tabs, carriage returns and colours. Other
//! control sequences of the form `ESC [ …` carry no text and are removed. Everything else (titles, clipboards, queries,
//! 8-bit controls) is shown in visible form, so that nothing readable can be hidden in it.
//!
//! Bytes for a file are not filtered: they are data. Bytes for a pipe are filtered if the user is at a terminal,
//! because `| head` and `| grep` pass on what they read.

/// Longer than any colour sequence. Longer sequences are shown as text.
const SEQUENCE_MAX: usize = 64;
const ESC: u8 = 0x1b;

/// Replaces control characters, and characters that change the text direction, with a visible form.
pub(crate) fn printable(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for letter in text.chars() {
        let kept = matches!(letter, '\n' | '\t') || !(letter.is_control() || is_bidi_control(letter));
        if kept { out.push(letter) } else { out.extend(letter.escape_default()) }
    }
    out
}

const fn is_bidi_control(letter: char) -> bool {
    matches!(letter, '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum FilterState {
    Text,
    /// After `ESC`.
    Escape,
    /// After `ESC [`; the sequence so far is in the buffer.
    Sequence,
    /// Inside a multi-byte character, with the number of remaining bytes.
    Utf8(usize),
}

/// Filters a stream in chunks. Sequences and characters may span chunks.
#[derive(Debug)]
pub(crate) struct TerminalFilter {
    state: FilterState,
    held: Vec<u8>,
    /// True if a colour is active, which must be reset at the end.
    painted: bool,
}

impl TerminalFilter {
    pub(crate) const fn new() -> Self {
        Self { state: FilterState::Text, held: Vec::new(), painted: false }
    }

    /// Returns the safe form of the next chunk.
    pub(crate) fn push(&mut self, bytes: &[u8]) -> Vec<u8> {
        let mut out = Vec::with_capacity(bytes.len());
        bytes.iter().for_each(|byte| self.byte(*byte, &mut out));
        out
    }

    /// Returns the rest: an incomplete sequence in visible form, and the reset of the last colour.
    pub(crate) fn end(&mut self) -> Vec<u8> {
        let mut out = Vec::new();
        self.flush_as_text(&mut out);
        if std::mem::take(&mut self.painted) {
            out.extend_from_slice(b"\x1b[0m");
        }
        out
    }

    fn byte(&mut self, byte: u8, out: &mut Vec<u8>) {
        match self.state {
            FilterState::Text => self.text(byte, out),
            FilterState::Escape if byte == b'[' => {
                self.held.push(byte);
                self.state = FilterState::Sequence;
            }
            FilterState::Escape => {
                self.flush_as_text(out);
                self.text(byte, out);
            }
            FilterState::Sequence => self.push_sequence_byte(byte, out),
            FilterState::Utf8(more) if (0x80..0xc0).contains(&byte) => {
                self.held.push(byte);
                if more > 1 {
                    self.state = FilterState::Utf8(more - 1);
                } else {
                    let held = std::mem::take(&mut self.held);
                    self.state = FilterState::Text;
                    push_char(&held, out);
                }
            }
            FilterState::Utf8(_) => {
                self.flush_as_text(out);
                self.text(byte, out);
            }
        }
    }

    fn text(&mut self, byte: u8, out: &mut Vec<u8>) {
        match byte {
            ESC => self.hold(byte, FilterState::Escape),
            b'\n' | b'\r' | b'\t' | 0x20..=0x7e => out.push(byte),
            0xc2..=0xdf => self.hold(byte, FilterState::Utf8(1)),
            0xe0..=0xef => self.hold(byte, FilterState::Utf8(2)),
            0xf0..=0xf4 => self.hold(byte, FilterState::Utf8(3)),
            0x00..=0x1f | 0x7f => out.extend([b'^', byte ^ 0x40]),
            0x80..=0xc1 | 0xf5..=0xff => push_replacement(out),
        }
    }

    fn hold(&mut self, byte: u8, state: FilterState) {
        self.held.push(byte);
        self.state = state;
    }

    /// Reads parameters and intermediate bytes, then a final byte.
    fn push_sequence_byte(&mut self, byte: u8, out: &mut Vec<u8>) {
        match byte {
            0x20..=0x3f if self.held.len() < SEQUENCE_MAX => self.held.push(byte),
            0x40..=0x7e => {
                let colours = &self.held[2..];
                let plain = |byte: &u8| byte.is_ascii_digit() || matches!(byte, b';' | b':');
                if byte == b'm' && colours.iter().all(plain) {
                    self.painted = !colours.iter().all(|byte| matches!(byte, b'0' | b';'));
                    out.extend_from_slice(&self.held);
                    out.push(byte);
                }
                self.held.clear();
                self.state = FilterState::Text;
            }
            _ => {
                self.flush_as_text(out);
                self.text(byte, out);
            }
        }
    }

    /// Shows buffered bytes that are not a valid sequence or character.
    fn flush_as_text(&mut self, out: &mut Vec<u8>) {
        let held = std::mem::take(&mut self.held);
        match self.state {
            FilterState::Text => {}
            FilterState::Escape | FilterState::Sequence => {
                out.extend_from_slice(b"^[");
                out.extend_from_slice(&held[1..]);
            }
            FilterState::Utf8(_) => push_replacement(out),
        }
        self.state = FilterState::Text;
    }
}

fn push_replacement(out: &mut Vec<u8>) {
    out.extend_from_slice("\u{fffd}".as_bytes());
}

/// Writes a multi-byte character. Controls beyond ASCII affect terminals as well.
fn push_char(bytes: &[u8], out: &mut Vec<u8>) {
    match std::str::from_utf8(bytes) {
        Ok(text) if text.chars().all(|letter| !letter.is_control() && !is_bidi_control(letter)) => {
            out.extend_from_slice(bytes);
        }
        Ok(text) => out.extend_from_slice(printable(text).as_bytes()),
        Err(_) => push_replacement(out),
    }
}

#[cfg(test)]
mod tests {
    use windlass_testkit::rng::Rng;

    use super::{TerminalFilter, printable};

    /// Checks that the result is the same for one chunk and byte by byte.
    #[track_caller]
    fn check(bytes: &[u8], shown: &str) {
        let mut filter = TerminalFilter::new();
        let mut whole = filter.push(bytes);
        whole.extend(filter.end());
        assert_eq!(String::from_utf8_lossy(&whole), shown);
        let mut filter = TerminalFilter::new();
        let mut cut: Vec<u8> = bytes.chunks(1).flat_map(|piece| filter.push(piece)).collect();
        cut.extend(filter.end());
        assert_eq!(String::from_utf8_lossy(&cut), shown, "in pieces");
    }

    /// Inputs with what a terminal and a page of the web UI show; `web/tests/unit/ansi.test.ts` reads it too.
    const CORPUS: &str = include_str!("terminal_corpus.json");

    #[test]
    fn the_corpus_that_is_shared_with_the_web_ui_is_shown_as_it_says() {
        let cases: Vec<serde_json::Value> = serde_json::from_str(CORPUS).unwrap();
        assert!(cases.len() > 10);
        for case in cases {
            check(case["input"].as_str().unwrap().as_bytes(), case["terminal"].as_str().unwrap());
        }
    }

    #[test]
    fn text_and_colour_sequences_pass_unchanged() {
        check(b"a\tb\r\nc\r", "a\tb\r\nc\r");
        check("grün 緑 🟢".as_bytes(), "grün 緑 🟢");
        check(b"\x1b[1;32mok\x1b[0m \x1b[38:5:8mx\x1b[m", "\u{1b}[1;32mok\u{1b}[0m \u{1b}[38:5:8mx\u{1b}[m");
    }

    #[test]
    fn an_unterminated_colour_is_reset_at_the_end() {
        check(b"\x1b[31mred", "\u{1b}[31mred\u{1b}[0m");
        check(b"\x1b[31mred\x1b[0;0m", "\u{1b}[31mred\u{1b}[0;0m");
    }

    #[test]
    fn cursor_movement_is_removed() {
        check(b"10%\x1b[2K\r20%\x1b[A\x1b[?25l\x1b[>4;2mx", "10%\r20%x");
    }

    #[test]
    fn sequences_that_carry_text_are_printed_not_executed() {
        // A title, the clipboard, a query, a device control string.
        check(b"\x1b]0;title\x07x", "^[]0;title^Gx");
        check(b"\x1b]52;c;Y3VybA==\x1b\\x", "^[]52;c;Y3VybA==^[\\x");
        check(b"\x1bc\x1bP$q\x08\x00\x7f", "^[c^[P$q^H^@^?");
        check("\u{9b}2J\u{90}x".as_bytes(), "\\u{9b}2J\\u{90}x");
        check(b"\x9b2J\xff", "\u{fffd}2J\u{fffd}");
    }

    #[test]
    fn incomplete_sequences_do_not_hide_text() {
        check(b"\x1b[12\nnext", "^[[12\nnext");
        check(b"\x1b[12", "^[[12");
        check(b"\x1b", "^[");
        check(b"\x1b\x1b[31mx\x1b[m", "^[\u{1b}[31mx\u{1b}[m");
        check(b"\xe2\x82x\xe2", "\u{fffd}x\u{fffd}");
        let long = [b"\x1b[".as_slice(), &[b'1'; 100], b"m"].concat();
        check(&long, &format!("^[[{}m", "1".repeat(100)));
    }

    #[test]
    fn names_cannot_inject_escape_sequences_or_reverse_the_text() {
        assert_eq!(printable("a\u{1b}[2Jb\nc"), "a\\u{1b}[2Jb\nc");
        assert_eq!(printable("\u{9b}1m"), "\\u{9b}1m");
        assert_eq!(printable("txt.\u{202e}exe"), "txt.\\u{202e}exe");
    }

    /// Finds a character that a terminal would interpret: anything but text, line breaks, tabs and colour sequences.
    fn drives(shown: &str) -> Option<char> {
        let mut rest = shown;
        while let Some(letter) = rest.chars().next() {
            rest = &rest[letter.len_utf8()..];
            if letter == '\u{1b}' {
                let after = rest.strip_prefix('[').map(|rest| {
                    rest.trim_start_matches(|c: char| c.is_ascii_digit() || c == ';' || c == ':')
                });
                let Some(after) = after.and_then(|rest| rest.strip_prefix('m')) else { return Some(letter) };
                rest = after;
            } else if letter.is_control() && !matches!(letter, '\n' | '\r' | '\t')
                || super::is_bidi_control(letter)
            {
                return Some(letter);
            }
        }
        None
    }

    #[test]
    fn fuzzed_input_yields_no_terminal_control_sequence() {
        const PIECES: &[&[u8]] = &[
            b"\x1b",
            b"[",
            b"]",
            b"0;",
            b"52;c;",
            b"m",
            b"J",
            b"H",
            b"?25l",
            b"P",
            b"\\",
            b"\x07",
            b"\x9b",
            b"\x9d",
            b"\xc2\x9b",
            b"\xe2\x80\xae",
            b"\xf0",
            b"\x80",
            b"\xff",
            b"text",
            b"\r\n",
            b"\x00",
            b"\x7f",
            b"8;;http://x",
            b"\x1b[31m",
            b"\x1b[",
        ];
        let rounds = std::env::var("FUZZ").ok().and_then(|text| text.parse().ok()).unwrap_or(2_000);
        let mut rng = Rng::new(0x5eed);
        for round in 0..rounds {
            let mut input = Vec::new();
            for _ in 0..rng.below(30) {
                match rng.below(4) {
                    0 => input.push(u8::try_from(rng.below(256)).unwrap()),
                    _ => input.extend_from_slice(rng.pick::<&[u8]>(PIECES)),
                }
            }
            let mut filter = TerminalFilter::new();
            let mut shown = Vec::new();
            let mut rest = input.as_slice();
            while !rest.is_empty() {
                let (piece, after) = rest.split_at(1 + rng.below(rest.len() as u64) as usize);
                shown.extend(filter.push(piece));
                rest = after;
            }
            shown.extend(filter.end());
            let shown = String::from_utf8(shown).unwrap();
            assert_eq!(drives(&shown), None, "round {round}: {input:?} becomes {shown:?}");
            let name = printable(&String::from_utf8_lossy(&input));
            assert!(!name.contains('\u{1b}') && drives(&name).is_none(), "round {round}: {name:?}");
        }
    }
}
