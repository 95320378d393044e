//! The only place that prints: data to stdout, talk to stderr.
//!
//! A reader that went away (`windlass … | head`) is no error: what it did not want to read is dropped.

mod ask;
mod list;
pub(crate) mod style;
pub(crate) mod table;
pub(crate) mod words;

use std::io::Write as _;

pub(crate) use self::{
    ask::{ask, can_ask, confirm, confirm_delete},
    list::{List, json_array, jsonl, one},
};

/// One line of data.
pub(crate) fn data(text: &str) {
    let mut out = std::io::stdout().lock();
    let _ = writeln!(out, "{text}");
}

/// Data as it is, to the byte. False when nobody reads any more.
pub(crate) fn raw(bytes: &[u8]) -> bool {
    let mut out = std::io::stdout().lock();
    out.write_all(bytes).and_then(|()| out.flush()).is_ok()
}

/// One line of talk.
pub(crate) fn say(text: &str) {
    let mut out = std::io::stderr().lock();
    let _ = writeln!(out, "{text}");
}

/// Control characters could drive the terminal: they are shown, not obeyed.
pub(crate) fn printable(text: &str) -> String {
    text.chars()
        .flat_map(|letter| {
            let keep = !letter.is_control() || letter == '\n' || letter == '\t';
            let shown: Vec<char> = if keep { vec![letter] } else { letter.escape_default().collect() };
            shown
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::printable;

    #[test]
    fn control_sequences_are_shown_and_not_obeyed() {
        assert_eq!(printable("a\u{1b}[2Jb\nc"), "a\\u{1b}[2Jb\nc");
        assert_eq!(printable("\u{9b}1m"), "\\u{9b}1m");
    }
}
