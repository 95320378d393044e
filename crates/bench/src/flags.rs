//! Options of a benchmark: `--name VALUE`.

use std::str::FromStr;

use anyhow::{Context, Result, bail};

pub struct Flags(Vec<String>);

impl Flags {
    pub fn new(words: impl Iterator<Item = String>) -> Self {
        Self(words.collect())
    }

    pub fn value<T: FromStr>(&mut self, name: &str) -> Result<Option<T>>
    where
        T::Err: std::error::Error + Send + Sync + 'static,
    {
        let Some(at) = self.0.iter().position(|word| word == name) else { return Ok(None) };
        self.0.remove(at);
        if at >= self.0.len() {
            bail!("`{name}` requires a value");
        }
        let text = self.0.remove(at);
        text.parse().map(Some).with_context(|| format!("invalid `{name}` value `{text}`"))
    }

    pub fn finish(self) -> Result<()> {
        match self.0.as_slice() {
            [] => Ok(()),
            words => bail!("unexpected arguments `{}`", words.join(" ")),
        }
    }
}
