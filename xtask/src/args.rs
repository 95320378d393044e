//! Command-line arguments, consumed one by one. Remaining arguments are rejected by name.

use std::str::FromStr;

use anyhow::{Context, Result, bail};

pub(crate) struct Args(Vec<String>);

impl Args {
    pub(crate) fn new(words: impl Iterator<Item = String>) -> Self {
        Self(words.collect())
    }

    /// Returns the next argument that is not an option.
    pub(crate) fn word(&mut self) -> Option<String> {
        match self.0.first() {
            Some(first) if !first.starts_with("--") => Some(self.0.remove(0)),
            _ => None,
        }
    }

    pub(crate) fn take_flag(&mut self, name: &str) -> bool {
        let before = self.0.len();
        self.0.retain(|word| word != name);
        self.0.len() < before
    }

    /// Parses `--name VALUE` or `--name=VALUE`.
    pub(crate) fn value<T: FromStr>(&mut self, name: &str) -> Result<Option<T>>
    where
        T::Err: std::error::Error + Send + Sync + 'static,
    {
        let joined = format!("{name}=");
        let Some(at) = self.0.iter().position(|word| word == name || word.starts_with(&joined)) else {
            return Ok(None);
        };
        let word = self.0.remove(at);
        let text = match word.strip_prefix(&joined) {
            Some(text) => text.to_owned(),
            None if at < self.0.len() => self.0.remove(at),
            None => bail!("`{name}` requires a value"),
        };
        text.parse().map(Some).with_context(|| format!("invalid `{name}` value `{text}`"))
    }

    /// Returns the remaining arguments, for a program that parses its own options.
    pub(crate) fn rest(self) -> Vec<String> {
        self.0
    }

    pub(crate) fn finish(self) -> Result<()> {
        match self.0.as_slice() {
            [] => Ok(()),
            words => bail!("unexpected arguments `{}`; see `cargo xtask help`", words.join(" ")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn args(line: &str) -> Args {
        Args::new(line.split_whitespace().map(str::to_owned))
    }

    #[test]
    fn option_values_follow_a_space_or_an_equals_sign() {
        let mut given = args("--seeds 20 --from=7");
        assert_eq!(given.value::<u64>("--seeds").unwrap(), Some(20));
        assert_eq!(given.value::<u64>("--from").unwrap(), Some(7));
        given.finish().unwrap();
    }

    #[test]
    fn a_missing_or_invalid_option_value_is_rejected() {
        assert!(args("--seeds").value::<u64>("--seeds").is_err());
        assert!(args("--seeds many").value::<u64>("--seeds").is_err());
    }

    #[test]
    fn unused_arguments_are_rejected_by_name() {
        let mut given = args("test --fast --slow");
        assert_eq!(given.word().as_deref(), Some("test"));
        assert!(given.take_flag("--fast"));
        assert!(given.finish().unwrap_err().to_string().contains("--slow"));
    }
}
