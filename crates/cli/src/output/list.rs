//! Output of resources in the six formats that all commands share.
//!
//! Every JSON document contains the version of its format; `docs/json.md` describes the formats.

use serde::Serialize;
use serde_json::Map;
use windlass_model::yaml_text::to_yaml;

use super::{print_data, print_message, table::Table, watch};
use crate::{cli::Format, error::CliError, exit::Exit};

/// Increases when a field of any document is removed or changes its meaning. New fields do not increase it.
pub(crate) const FORMAT_VERSION: u32 = 1;

/// A list of resources of one kind.
pub(crate) struct ListView<'a, T> {
    /// Their project; `None` for resources of the whole server.
    pub(crate) project: Option<&'a str>,
    /// Key of the rows in the document: the plural noun.
    pub(crate) kind: &'static str,
    /// Value of a row for `-o name`.
    pub(crate) name: fn(&T) -> String,
    /// Message if there are no rows.
    pub(crate) none: &'a str,
}

impl<T: Serialize> ListView<'_, T> {
    /// The argument of `table` is true if all columns are requested.
    pub(crate) fn print(
        &self,
        rows: &[T],
        format: Format,
        table: impl FnOnce(bool) -> Table,
    ) -> Result<(), CliError> {
        match format {
            Format::Json => print_json(&self.document(rows)?)?,
            Format::Yaml => print_yaml(&self.document(rows)?)?,
            Format::Jsonl => print_jsonl(rows)?,
            Format::Name => rows.iter().for_each(|row| print_data(&super::printable(&(self.name)(row)))),
            Format::Table | Format::Wide if rows.is_empty() => print_message(self.none),
            Format::Table => table(false).print(),
            Format::Wide => table(true).whole().print(),
        }
        Ok(())
    }

    /// Prints once, or with `watch` again after each change.
    pub(crate) async fn show(
        &self,
        format: Format,
        watch: bool,
        fetch: impl AsyncFn() -> Result<Vec<T>, CliError>,
        table: fn(&[T], bool) -> Table,
    ) -> Result<Exit, CliError> {
        if watch {
            return watch::watch_table(format, async |wide| Ok(table(&fetch().await?, wide))).await;
        }
        let rows = fetch().await?;
        self.print(&rows, format, |wide| table(&rows, wide))?;
        Ok(Exit::Done)
    }

    fn document(&self, rows: &[T]) -> Result<Map<String, serde_json::Value>, CliError> {
        let mut document = Map::new();
        document.extend(self.project.map(|project| ("project".to_owned(), project.into())));
        let rows = serde_json::to_value(rows)
            .map_err(|error| CliError::from_error("failed to write JSON", &error))?;
        document.insert(self.kind.to_owned(), rows);
        Ok(document)
    }
}

/// Prints one resource: the object itself in JSON, else the output of `show`.
pub(crate) fn print_one<T: Serialize>(
    format: Format,
    thing: &T,
    name: &str,
    show: impl FnOnce(bool),
) -> Result<(), CliError> {
    match format {
        Format::Json => print_json(thing)?,
        Format::Yaml => print_yaml(thing)?,
        Format::Jsonl => print_jsonl(std::slice::from_ref(thing))?,
        Format::Name => print_data(&super::printable(name)),
        Format::Table | Format::Wide => show(format == Format::Wide),
    }
    Ok(())
}

/// A document with its format version.
#[derive(Serialize)]
struct VersionedDocument<'a, T> {
    version: u32,
    #[serde(flatten)]
    value: &'a T,
}

/// Prints a JSON document.
fn print_json<T: Serialize>(value: &T) -> Result<(), CliError> {
    print_data(&to_json_text(value, |value| serde_json::to_string_pretty(value))?);
    Ok(())
}

/// Prints a YAML document.
fn print_yaml<T: Serialize>(value: &T) -> Result<(), CliError> {
    print_data(&yaml_text(&VersionedDocument { version: FORMAT_VERSION, value })?);
    Ok(())
}

/// Prints YAML documents one after the other.
pub(crate) fn print_yaml_stream<T: Serialize>(values: &[T]) -> Result<(), CliError> {
    for value in values {
        print_data("---");
        print_yaml(value)?;
    }
    Ok(())
}

fn yaml_text<T: Serialize>(value: &T) -> Result<String, CliError> {
    let value =
        serde_json::to_value(value).map_err(|error| CliError::from_error("failed to write YAML", &error))?;
    Ok(to_yaml(&value))
}

/// Prints one document per line.
pub(crate) fn print_jsonl<T: Serialize>(values: &[T]) -> Result<(), CliError> {
    for value in values {
        print_data(&to_json_text(value, |value| serde_json::to_string(value))?);
    }
    Ok(())
}

/// Prints several documents in one array, for output without a kind.
pub(crate) fn print_json_array<T: Serialize>(values: &[T]) -> Result<(), CliError> {
    let values: Vec<VersionedDocument<'_, T>> =
        values.iter().map(|value| VersionedDocument { version: FORMAT_VERSION, value }).collect();
    let text = serde_json::to_string_pretty(&values)
        .map_err(|error| CliError::from_error("failed to write JSON", &error))?;
    print_data(&text);
    Ok(())
}

fn to_json_text<T: Serialize>(
    value: &T,
    write: impl FnOnce(&VersionedDocument<'_, T>) -> serde_json::Result<String>,
) -> Result<String, CliError> {
    write(&VersionedDocument { version: FORMAT_VERSION, value })
        .map_err(|error| CliError::from_error("failed to write JSON", &error))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::to_json_text;

    #[test]
    fn version_is_the_first_field_of_json_output() {
        let line = to_json_text(&json!({ "name": "a", "cpus": 1.50 }), |value| serde_json::to_string(value))
            .unwrap();
        assert_eq!(line, r#"{"version":1,"name":"a","cpus":1.5}"#);
    }
}
