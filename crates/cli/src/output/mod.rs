//! The only module that prints: data to stdout, messages to stderr.
//!
//! A closed stdout (`windlass … | head`) is not an error: the remaining output is dropped.

pub(crate) mod detail_view;
pub(crate) mod format;
mod list;
mod prompt;
pub(crate) mod sparkline;
pub(crate) mod style;
pub(crate) mod table;
pub(crate) mod terminal_filter;
pub(crate) mod watch;

use std::io::{IsTerminal as _, Write as _};

pub(crate) use self::{
    list::{ListView, print_json_array, print_jsonl, print_one, print_yaml_stream},
    prompt::{can_prompt, confirm, confirm_delete, delete, prompt_secret},
    terminal_filter::printable,
};

/// Prints one line of data. On a terminal only colour sequences have an effect.
pub(crate) fn print_data(text: &str) {
    let mut out = std::io::stdout().lock();
    let _ = if is_for_a_screen() { out.write_all(&filter_line(text)) } else { writeln!(out, "{text}") };
}

/// Target of stdout.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum StdoutKind {
    Terminal,
    /// Another program, which may pass on what it reads.
    Pipe,
    File,
}

impl StdoutKind {
    fn detect() -> Self {
        if std::io::stdout().is_terminal() {
            return Self::Terminal;
        }
        let kind = rustix::fs::fstat(std::io::stdout())
            .map(|stat| rustix::fs::FileType::from_raw_mode(stat.st_mode))
            .ok();
        if kind == Some(rustix::fs::FileType::Fifo) { Self::Pipe } else { Self::File }
    }

    /// Returns whether the output is shown on a screen. For a pipe (`| head`) that is likely if stderr is a terminal. A
    /// file, and a script without a terminal, receive every byte.
    const fn is_stdout_for_screen(self, stderr_is_terminal: bool) -> bool {
        match self {
            Self::Terminal => true,
            Self::Pipe => stderr_is_terminal,
            Self::File => false,
        }
    }
}

fn is_for_a_screen() -> bool {
    StdoutKind::detect().is_stdout_for_screen(std::io::stderr().is_terminal())
}

/// Writes bytes unmodified. Returns false if stdout is closed.
pub(crate) fn write_raw(bytes: &[u8]) -> bool {
    let mut out = std::io::stdout().lock();
    out.write_all(bytes).and_then(|()| out.flush()).is_ok()
}

/// Writes the output of a job to stdout: filtered for a screen, unmodified elsewhere.
pub(crate) struct UntrustedWriter {
    filter: Option<terminal_filter::TerminalFilter>,
}

impl UntrustedWriter {
    /// `raw` disables the filter.
    pub(crate) fn new(raw: bool) -> Self {
        let filter = is_for_a_screen() && !raw;
        Self { filter: filter.then(terminal_filter::TerminalFilter::new) }
    }

    /// Returns false if stdout is closed.
    pub(crate) fn write(&mut self, bytes: &[u8]) -> bool {
        match &mut self.filter {
            Some(filter) => write_raw(&filter.push(bytes)),
            None => write_raw(bytes),
        }
    }
}

impl Drop for UntrustedWriter {
    fn drop(&mut self) {
        if let Some(filter) = &mut self.filter {
            write_raw(&filter.end());
        }
    }
}

/// Stdout as an async stream.
pub(crate) fn async_stdout() -> tokio::io::Stdout {
    tokio::io::stdout()
}

/// Width of a terminal; `None` if the stream is not one.
pub(crate) fn columns(stream: &(impl std::io::IsTerminal + std::os::fd::AsFd)) -> Option<usize> {
    if !stream.is_terminal() {
        return None;
    }
    let size = rustix::termios::tcgetwinsize(stream).ok()?;
    Some(usize::from(size.ws_col)).filter(|columns| *columns > 0)
}

/// Returns whether stdout and stderr are both terminals.
pub(crate) fn is_same_screen() -> bool {
    std::io::stdout().is_terminal() && std::io::stderr().is_terminal()
}

/// Prints a message, in which only colour sequences have an effect.
pub(crate) fn print_message(text: &str) {
    let _ = std::io::stderr().lock().write_all(&filter_line(text));
}

fn filter_line(text: &str) -> Vec<u8> {
    let mut filter = terminal_filter::TerminalFilter::new();
    let mut bytes = filter.push(text.as_bytes());
    bytes.extend(filter.end());
    bytes.push(b'\n');
    bytes
}

#[cfg(test)]
mod tests {
    use super::StdoutKind;

    #[test]
    fn output_is_filtered_if_it_may_reach_a_terminal_and_raw_otherwise() {
        for (out, stderr_is_terminal, filtered) in [
            (StdoutKind::Terminal, true, true),
            (StdoutKind::Terminal, false, true),
            (StdoutKind::Pipe, true, true),
            (StdoutKind::Pipe, false, false),
            (StdoutKind::File, true, false),
            (StdoutKind::File, false, false),
        ] {
            assert_eq!(
                out.is_stdout_for_screen(stderr_is_terminal),
                filtered,
                "{out:?} {stderr_is_terminal}"
            );
        }
    }
}
