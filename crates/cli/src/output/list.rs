//! How a command answers with things: the same five formats everywhere.
//!
//! Every JSON document says which version of these shapes it is written in; `docs/json.md` describes them.

use serde::Serialize;
use serde_json::Map;

use super::{data, live, print_message, table::Table};
use crate::{cli::Format, exit::Exit, problem::CliError};

/// Raised when a field of any document is removed or changes its meaning. New fields do not raise it.
pub(crate) const FORMAT_VERSION: u32 = 1;

/// A list of things of one kind.
pub(crate) struct ListView<'a, T> {
    /// The project that they are in; things of the whole server have none.
    pub(crate) project: Option<&'a str>,
    /// The key of the rows in the document: the plural noun.
    pub(crate) kind: &'static str,
    /// What `-o name` prints of a row.
    pub(crate) name: fn(&T) -> String,
    /// Said instead of a table without rows.
    pub(crate) none: &'a str,
}

impl<T: Serialize> ListView<'_, T> {
    /// `table` is asked whether every column is wanted.
    pub(crate) fn print(
        &self,
        rows: &[T],
        format: Format,
        table: impl FnOnce(bool) -> Table,
    ) -> Result<(), CliError> {
        match format {
            Format::Json => self.document(rows)?,
            Format::Jsonl => print_jsonl(rows)?,
            Format::Name => rows.iter().for_each(|row| data(&super::printable(&(self.name)(row)))),
            Format::Table | Format::Wide if rows.is_empty() => print_message(self.none),
            Format::Table => table(false).print(),
            Format::Wide => table(true).whole().print(),
        }
        Ok(())
    }

    /// Once, or with `watch` again whenever it changes.
    pub(crate) async fn show(
        &self,
        format: Format,
        watch: bool,
        fetch: impl AsyncFn() -> Result<Vec<T>, CliError>,
        table: fn(&[T], bool) -> Table,
    ) -> Result<Exit, CliError> {
        if watch {
            return live::watch_table(format, async |wide| Ok(table(&fetch().await?, wide))).await;
        }
        let rows = fetch().await?;
        self.print(&rows, format, |wide| table(&rows, wide))?;
        Ok(Exit::Done)
    }

    fn document(&self, rows: &[T]) -> Result<(), CliError> {
        let mut document = Map::new();
        document.extend(self.project.map(|project| ("project".to_owned(), project.into())));
        let rows = serde_json::to_value(rows).map_err(|error| CliError::from_error("write JSON", &error))?;
        document.insert(self.kind.to_owned(), rows);
        print_json(&document)
    }
}

/// One thing: the object itself in JSON, else what `show` prints.
pub(crate) fn print_one<T: Serialize>(
    format: Format,
    thing: &T,
    name: &str,
    show: impl FnOnce(bool),
) -> Result<(), CliError> {
    match format {
        Format::Json => print_json(thing)?,
        Format::Jsonl => print_jsonl(std::slice::from_ref(thing))?,
        Format::Name => data(&super::printable(name)),
        Format::Table | Format::Wide => show(format == Format::Wide),
    }
    Ok(())
}

/// A document with its version in front.
#[derive(Serialize)]
struct VersionedDocument<'a, T> {
    version: u32,
    #[serde(flatten)]
    value: &'a T,
}

/// A document that programs read.
fn print_json<T: Serialize>(value: &T) -> Result<(), CliError> {
    data(&text(value, |value| serde_json::to_string_pretty(value))?);
    Ok(())
}

/// One document for each line.
pub(crate) fn print_jsonl<T: Serialize>(values: &[T]) -> Result<(), CliError> {
    for value in values {
        data(&text(value, |value| serde_json::to_string(value))?);
    }
    Ok(())
}

/// Several documents in one array, for a command whose answer has no name.
pub(crate) fn print_json_array<T: Serialize>(values: &[T]) -> Result<(), CliError> {
    let values: Vec<VersionedDocument<'_, T>> =
        values.iter().map(|value| VersionedDocument { version: FORMAT_VERSION, value }).collect();
    let text =
        serde_json::to_string_pretty(&values).map_err(|error| CliError::from_error("write JSON", &error))?;
    data(&text);
    Ok(())
}

fn text<T: Serialize>(
    value: &T,
    write: impl FnOnce(&VersionedDocument<'_, T>) -> serde_json::Result<String>,
) -> Result<String, CliError> {
    write(&VersionedDocument { version: FORMAT_VERSION, value })
        .map_err(|error| CliError::from_error("write JSON", &error))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::text;

    #[test]
    fn the_version_stands_in_front_of_what_a_document_says() {
        let line = text(&json!({ "name": "a", "cpus": 1.50 }), |value| serde_json::to_string(value)).unwrap();
        assert_eq!(line, r#"{"version":1,"name":"a","cpus":1.5}"#);
    }
}
