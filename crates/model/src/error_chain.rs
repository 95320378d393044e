//! Formatting of errors with their causes.

use std::error::Error;

/// Returns an error and its causes in one line. A cause that the previous message already ends with is not repeated.
pub fn chain(error: &dyn Error) -> String {
    let mut said = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        let words = cause.to_string();
        if !said.ends_with(&words) {
            said = format!("{said}: {words}");
        }
        source = cause.source();
    }
    said
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
    fn every_cause_is_said_once() {
        let read = Failure::Read(std::fmt::Error);
        let cause = std::fmt::Error.to_string();
        assert_eq!(chain(&read), format!("read the file: {cause}"));
        let start = Failure::Start(Box::new(read));
        assert_eq!(chain(&start), format!("start: read the file: {cause}"));
    }
}
