//! Tables that are updated when they change.

use std::{io::IsTerminal as _, time::Duration};

use super::{print_data, table::Table, write_raw};
use crate::{cli::Format, error::CliError, exit::Exit};

const POLL_INTERVAL: Duration = Duration::from_secs(2);

/// Prints the table after each change, until interrupted. On a terminal each table replaces the previous one; in a pipe
/// they follow each other.
pub(crate) async fn watch_table(
    format: Format,
    mut refresh: impl AsyncFnMut(bool) -> Result<Table, CliError>,
) -> Result<Exit, CliError> {
    let wide = match format {
        Format::Table => false,
        Format::Wide => true,
        Format::Json | Format::Jsonl | Format::Yaml | Format::Name => {
            return Err(
                CliError::usage("`-w` requires the output format `table` or `wide`").hint("omit `-o`")
            );
        }
    };
    let mut before = Vec::new();
    loop {
        let table = refresh(wide).await?;
        let lines = if wide { table.whole().screen() } else { table.screen() };
        if lines != before {
            if std::io::stdout().is_terminal() {
                // Move the cursor home and clear the screen.
                write_raw(b"\x1b[H\x1b[2J");
            }
            lines.iter().for_each(|line| print_data(line));
            before = lines;
        }
        tokio::time::sleep(POLL_INTERVAL).await;
    }
}
