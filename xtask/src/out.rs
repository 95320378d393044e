//! The only place of xtask that prints. Answers go to stdout, talk goes to stderr.

#![expect(clippy::print_stdout, clippy::print_stderr, reason = "the one output module of this program")]

pub(crate) fn print_result(text: &str) {
    println!("{text}");
}

pub(crate) fn print_message(text: &str) {
    eprintln!("{text}");
}

/// The start of a level or step. On stderr, where cargo and nextest write too, so the order stays right.
pub(crate) fn print_heading(text: &str) {
    eprintln!("\n── {text}");
}
