//! The only place that prints: data to stdout, talk to stderr.
//!
//! A reader that went away (`windlass … | head`) is no error: what it did not want to read is dropped.

pub(crate) mod style;
pub(crate) mod table;
pub(crate) mod words;

use std::io::{BufRead as _, IsTerminal as _, Write as _};

use serde::Serialize;

use crate::problem::Problem;

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

/// A document that programs read.
pub(crate) fn json<T: Serialize>(value: &T) -> Result<(), Problem> {
    let text = serde_json::to_string_pretty(value).map_err(|error| Problem::caused("write JSON", &error))?;
    data(&text);
    Ok(())
}

/// One document for each line.
pub(crate) fn jsonl<T: Serialize>(values: &[T]) -> Result<(), Problem> {
    for value in values {
        data(&serde_json::to_string(value).map_err(|error| Problem::caused("write JSON", &error))?);
    }
    Ok(())
}

/// Whether somebody is there to answer a question.
pub(crate) fn can_ask() -> bool {
    std::io::stdin().is_terminal() && std::io::stderr().is_terminal()
}

/// Asks until the answer is yes or no. The end of the input is no.
pub(crate) fn ask(question: &str) -> bool {
    loop {
        {
            let mut out = std::io::stderr().lock();
            let _ = write!(out, "{question} [y/n] ").and_then(|()| out.flush());
        }
        let mut answer = String::new();
        match std::io::stdin().lock().read_line(&mut answer) {
            Ok(0) | Err(_) => return false,
            Ok(_) => {}
        }
        match answer.trim().to_ascii_lowercase().as_str() {
            "y" | "yes" => return true,
            "n" | "no" => return false,
            _ => {}
        }
    }
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
