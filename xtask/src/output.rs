//! The only module of xtask that prints. Results go to stdout, messages to stderr.

#![expect(clippy::print_stdout, clippy::print_stderr, reason = "the one output module of this program")]

pub(crate) fn print_result(text: &str) {
    println!("{text}");
}

pub(crate) fn print_message(text: &str) {
    eprintln!("{text}");
}

/// Prints the start of a level or step. On stderr, like cargo and nextest, so that the order is right.
pub(crate) fn print_heading(text: &str) {
    eprintln!("\n── {text}");
}
