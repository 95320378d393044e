//! Formatting of errors with their causes.

use std::error::Error;

/// Returns an error and its causes in one line. A cause that the previous message already ends with is not repeated.
pub fn format_chain(error: &dyn Error) -> String {
    let mut message = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        let words = cause.to_string();
        if !message.ends_with(&words) {
            message = format!("{message}: {words}");
        }
        source = cause.source();
    }
    message
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug, thiserror::Error)]
    enum Failure {
        #[error("read the file")]
        Read(#[source] std::fmt::Error),
        #[error("start: {0}")]
        Start(#[source] Box<Failure>),
    }

    #[test]
    fn error_chain_prints_every_cause_once() {
        let read = Failure::Read(std::fmt::Error);
        let cause = std::fmt::Error.to_string();
        assert_eq!(format_chain(&read), format!("read the file: {cause}"));
        let start = Failure::Start(Box::new(read));
        assert_eq!(format_chain(&start), format!("start: read the file: {cause}"));
    }
}
