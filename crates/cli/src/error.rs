//! Errors for users: what went wrong, why, and how to fix it.

mod code;

use std::fmt::Write as _;

use windlass_api::client::CallError;
use windlass_dial::DialError;

pub(crate) use self::code::ErrorCode;
use crate::{
    exit::Exit,
    output::{self, printable, style::Style},
};

/// An error that is only printed and sets the exit code; callers do not match on its kind.
#[derive(Debug)]
pub(crate) struct CliError {
    code: ErrorCode,
    what: String,
    why: Vec<String>,
    hint: Option<String>,
    exit: Exit,
}

impl CliError {
    pub(crate) fn new(what: impl Into<String>) -> Self {
        Self { code: ErrorCode::Failed, what: what.into(), why: Vec::new(), hint: None, exit: Exit::Failed }
    }

    /// An error in the arguments.
    pub(crate) fn usage(what: impl Into<String>) -> Self {
        Self { code: ErrorCode::Usage, exit: Exit::Usage, ..Self::new(what) }
    }

    /// An error that was already printed; only the exit code remains.
    pub(crate) fn reported() -> Self {
        Self::new("")
    }

    /// Sets a more specific code.
    #[must_use]
    pub(crate) fn code(mut self, code: ErrorCode) -> Self {
        self.code = code;
        self
    }

    #[must_use]
    pub(crate) fn why(mut self, why: impl Into<String>) -> Self {
        self.why.push(why.into());
        self
    }

    #[must_use]
    pub(crate) fn hint(mut self, hint: impl Into<String>) -> Self {
        self.hint = Some(hint.into());
        self
    }

    /// Sets an exit code from 200, for commands whose lower exit codes belong to a job.
    #[must_use]
    pub(crate) fn ours(mut self) -> Self {
        if self.exit == Exit::Failed {
            self.exit = Exit::RunFailed;
        }
        self
    }

    pub(crate) const fn exit(&self) -> Exit {
        self.exit
    }

    /// Returns problem and reason in one line, and the hint, for other formats.
    pub(crate) fn parts(&self) -> (String, String) {
        let text: Vec<&str> = std::iter::once(&self.what).chain(&self.why).map(String::as_str).collect();
        (text.join(": "), self.hint.clone().unwrap_or_else(|| explain_hint(self.code)))
    }

    /// `error[CODE]: what: why` and a line for the hint; empty if the error was already printed.
    pub(crate) fn text(&self) -> String {
        if self.what.is_empty() {
            return String::new();
        }
        let mut text = format!("error[{}]: {}", self.code.id(), self.what);
        for why in &self.why {
            let _ = write!(text, ": {why}");
        }
        let _ = write!(text, "\n  hint: {}", self.hint.clone().unwrap_or_else(|| explain_hint(self.code)));
        printable(&text)
    }

    /// A failed call to the server at `url`.
    pub(crate) fn call(url: &str, error: &CallError) -> Self {
        match error {
            CallError::Dial(DialError::Connect { source, .. }) => {
                Self::new(format!("cannot reach the server at {url}"))
                    .code(ErrorCode::Unreachable)
                    .why(source.to_string())
                    .hint("check that it is running, or run `windlass login --url URL --token TOKEN` to use another one")
            }
            CallError::Dial(DialError::Lookup(error)) => {
                Self::new(format!("cannot resolve the host name `{}` of the server", error.name))
                    .code(ErrorCode::Address)
                    .why(format_lookup_error(&error.why))
                    .hint("check the spelling of the address, and that this machine can resolve names")
            }
            CallError::Dial(error @ DialError::NotAllowed { .. }) => {
                Self::from_error(&format!("cannot reach the server at {url}"), error).code(ErrorCode::Unreachable)
            }
            CallError::Dial(DialError::Tls { source, .. }) if is_plaintext_reply(&source.to_string()) => {
                Self::new(format!("cannot reach the server at {url}"))
                    .code(ErrorCode::Untrusted)
                    .why("this port does not use HTTPS")
                    .hint(format!("try {}", url.replacen("https://", "http://", 1)))
            }
            CallError::Dial(DialError::Tls { source, .. }) => Self::new(format!("cannot verify the server at {url}"))
                .code(ErrorCode::Untrusted)
                .why(source.to_string())
                .hint("pass the certificate of the server with `--server-cert FILE`"),
            CallError::TlsRoots(error) => {
                Self::from_error(&format!("cannot verify the server at {url}"), error).code(ErrorCode::Untrusted)
            }
            CallError::InvalidUrl { url } => Self::new(format!("invalid server address `{url}`"))
                .code(ErrorCode::Address)
                .hint("use an address such as http://host:3000 or https://host:3443"),
            CallError::Denied { status: 403, msg } if msg == "Invalid token" => {
                Self::new(format!("cannot log in to {url}"))
                    .code(ErrorCode::UnknownToken)
                    .why("the server does not know this token")
                    .hint("run `windlass login --url URL --token TOKEN` with a token of that server")
            }
            CallError::Denied { status: 403, msg } if msg != "Access denied" => {
                // The server's message names the missing right, and who has it.
                let (why, hint) = msg.split_once("; hint: ").unwrap_or((msg, ""));
                let problem = Self::new("permission denied").code(ErrorCode::NotAllowed).why(why);
                if hint.is_empty() { problem } else { problem.hint(hint) }
            }
            CallError::Denied { status: 403, .. } => Self::new("permission denied")
                .code(ErrorCode::NotAllowed)
                .why("this user may not perform this operation")
                .hint("ask an admin of the project or of the server for the required role"),
            CallError::Exchange(_)
            | CallError::TimedOut
            | CallError::Encode(_)
            | CallError::Build(_)
            | CallError::Decode(_)
            | CallError::Base64(_)
            | CallError::LineTooLong => Self::from_error(&format!("failed to communicate with the server at {url}"), error)
                .code(ErrorCode::ProtocolError),
            CallError::Refused(_) | CallError::Denied { .. } | CallError::Status { .. } => {
                Self::from_error("the server rejected the request", error).code(ErrorCode::Refused)
            }
        }
    }

    /// An error with all its causes.
    pub(crate) fn from_error(what: &str, error: &dyn std::error::Error) -> Self {
        let mut texts = vec![error.to_string()];
        let mut cause = error.source();
        while let Some(error) = cause {
            texts.push(error.to_string());
            cause = error.source();
        }
        Self { why: dedup_causes(texts.into_iter()), ..Self::new(what) }
    }
}

/// Prints the output of the flag parser: help, the version, or an error, which gets a code like all others.
pub(crate) fn report_usage_error(error: &clap::Error) -> Exit {
    if !error.use_stderr() {
        // A closed stdout is not an error.
        let _ = error.print();
        return Exit::Done;
    }
    let rendered = error.render();
    let text = if Style::stderr().is_enabled() { rendered.ansi().to_string() } else { rendered.to_string() };
    output::print_message(
        text.replacen("error:", &format!("error[{}]:", ErrorCode::Usage.id()), 1).trim_end(),
    );
    Exit::Usage
}

/// Removes causes that repeat a previous text, as wrapping errors do.
fn dedup_causes(texts: impl Iterator<Item = String>) -> Vec<String> {
    let mut reported: Vec<String> = Vec::new();
    for text in texts {
        if !reported.iter().any(|before| before.contains(&text) || text.ends_with(before.as_str())) {
            reported.push(text);
        }
    }
    reported
}

/// Detects the reply of a server without TLS.
fn is_plaintext_reply(message: &str) -> bool {
    message.contains("InvalidContentType")
}

/// Shortens the message of the resolver, which contains the whole query.
fn format_lookup_error(why: &str) -> String {
    if why.contains("no records found") { "host name not found".to_owned() } else { why.to_owned() }
}

/// Default hint.
fn explain_hint(code: ErrorCode) -> String {
    format!("run `windlass explain {}` for details", code.id())
}

impl From<anyhow::Error> for CliError {
    fn from(error: anyhow::Error) -> Self {
        let mut causes = error.chain().map(ToString::to_string);
        let what = causes.next().unwrap_or_default();
        Self { why: dedup_causes(causes), ..Self::new(what) }
    }
}

#[cfg(test)]
mod tests {
    use super::{CliError, Exit, format_lookup_error, is_plaintext_reply};

    #[test]
    fn library_errors_are_rewritten_for_users() {
        assert!(is_plaintext_reply("received corrupt message of type InvalidContentType"));
        let raw = "DNS error: no records found for Query { name: Name(\"nowhere.invalid.\") }";
        assert_eq!(format_lookup_error(raw), "host name not found");
        assert_eq!(format_lookup_error("timed out"), "timed out");
        let texts = ["open the database", "file is not a database", "Error code 26: file is not a database"];
        assert_eq!(super::dedup_causes(texts.map(str::to_owned).into_iter()), texts[..2]);
    }

    #[test]
    fn an_error_shows_the_problem_its_causes_and_a_hint() {
        let problem = CliError::new("do it").why("no").why("never").hint("wait");
        assert_eq!(problem.text(), "error[W001]: do it: no: never\n  hint: wait");
        assert_eq!(problem.ours().exit(), Exit::RunFailed);
        assert_eq!(CliError::usage("x").ours().exit(), Exit::Usage);
    }
}
