//! Tables: columns as wide as their widest cell, two spaces between. On a terminal they fit its width: addresses move to
//! separate lines, the least important columns are left out, and the widest cells are truncated.

use super::{
    columns, print_data, printable,
    style::{Colour, Style},
};

/// Minimum width of a truncated column.
const WIDTH_MIN: usize = 8;
/// Width that a column gets before another one is left out for it.
const WIDTH_USEFUL: usize = 24;
/// Indentation of a cell on a separate line.
const FOLD_INDENT: &str = "  ";
/// Number of spaces between two columns.
const GAP: usize = 2;

#[derive(Clone, Debug)]
pub(crate) struct Cell {
    text: String,
    colour: Colour,
}

impl Cell {
    pub(crate) fn new(text: impl Into<String>) -> Self {
        let text = printable(&text.into()).replace(['\n', '\t'], " ");
        Self { text: if text.is_empty() { "-".to_owned() } else { text }, colour: Colour::None }
    }

    pub(crate) fn coloured(text: impl Into<String>, colour: Colour) -> Self {
        Self { colour, ..Self::new(text) }
    }

    pub(crate) fn status(text: impl Into<String>) -> Self {
        let text = text.into();
        let colour = Colour::for_status(&text);
        Self::coloured(text, colour)
    }
}

impl<T: Into<String>> From<T> for Cell {
    fn from(text: T) -> Self {
        Self::new(text)
    }
}

#[derive(Debug)]
pub(crate) struct Table {
    head: Vec<&'static str>,
    rows: Vec<Vec<Cell>>,
    /// Columns that are truncated last.
    kept: Vec<&'static str>,
    /// Column whose cells move to separate lines on a narrow terminal.
    folded: Option<&'static str>,
    /// Columns that are left out on a narrow terminal, the least important one first.
    optional: Vec<&'static str>,
    is_whole: bool,
}

impl Table {
    pub(crate) fn new(head: impl Into<Vec<&'static str>>) -> Self {
        let head: Vec<&'static str> = head.into();
        let kept = head.first().copied().into_iter().collect();
        Self { head, rows: Vec::new(), kept, folded: None, optional: Vec::new(), is_whole: false }
    }

    /// Marks a column to be truncated last, like the first one.
    pub(crate) fn keep(&mut self, column: &'static str) {
        self.kept.push(column);
    }

    /// Marks a column whose cells move to separate lines on a narrow terminal, because a part of them is useless.
    pub(crate) fn fold(&mut self, column: &'static str) {
        self.folded = Some(column);
    }

    /// Marks columns to be left out on a narrow terminal, the least important one first.
    pub(crate) fn optional(&mut self, columns: impl Into<Vec<&'static str>>) {
        self.optional = columns.into();
    }

    /// Disables truncation, for users who requested all details.
    pub(crate) fn whole(mut self) -> Self {
        self.is_whole = true;
        self
    }

    pub(crate) fn row(&mut self, cells: Vec<Cell>) {
        self.rows.push(cells);
    }

    /// Prints to stdout; prints nothing without rows.
    pub(crate) fn print(&self) {
        if self.rows.is_empty() {
            return;
        }
        self.screen().iter().for_each(|line| print_data(line));
    }

    /// Renders for stdout.
    pub(crate) fn screen(&self) -> Vec<String> {
        self.lines_fitting(Style::stdout(), columns(&std::io::stdout()))
    }

    /// Renders without truncation.
    pub(crate) fn lines(&self, style: Style) -> Vec<String> {
        self.lines_fitting(style, None)
    }

    /// Renders lines of at most `columns` characters, as far as cells can be truncated.
    pub(crate) fn lines_fitting(&self, style: Style, columns: Option<usize>) -> Vec<String> {
        let head: Vec<Cell> = self.head.iter().map(|name| Cell::coloured(*name, Colour::Bold)).collect();
        let all: Vec<&Vec<Cell>> = std::iter::once(&head).chain(&self.rows).collect();
        let width = |column: usize| {
            all.iter()
                .filter_map(|row| row.get(column))
                .map(|cell| cell.text.chars().count())
                .max()
                .unwrap_or(0)
        };
        let mut widths: Vec<usize> = (0..self.head.len()).map(width).collect();
        let mut shown = vec![true; widths.len()];
        if let Some(columns) = columns.filter(|_| !self.is_whole) {
            self.leave_out_columns(&widths, &mut shown, columns);
            self.shrink_columns(&mut widths, &shown, columns);
        }
        let folded = self.folded.and_then(|name| self.position(name)).filter(|at| !shown[*at]);
        let lines = all.iter().enumerate().flat_map(|(num, row)| {
            let cell = folded.and_then(|at| row.get(at)).filter(|cell| num > 0 && cell.text != "-");
            let below = cell.map(|cell| format!("{FOLD_INDENT}{}", style.paint(cell.colour, &cell.text)));
            std::iter::once(render_line(row, &widths, &shown, style)).chain(below)
        });
        lines.collect()
    }

    fn position(&self, column: &str) -> Option<usize> {
        self.head.iter().position(|name| *name == column)
    }

    /// Leaves out columns until the others have a useful width.
    fn leave_out_columns(&self, widths: &[usize], shown: &mut [bool], columns: usize) {
        let is_short = |name: &'static str| !self.kept.contains(&name) && self.folded != Some(name);
        let useful =
            |at: usize| if is_short(self.head[at]) { widths[at].min(WIDTH_USEFUL) } else { widths[at] };
        for name in self.folded.iter().chain(&self.optional) {
            let wanted: usize = (0..widths.len()).filter(|at| shown[*at]).map(|at| useful(at) + GAP).sum();
            if wanted <= columns + GAP {
                return;
            }
            if let Some(at) = self.position(name) {
                shown[at] = false;
            }
        }
    }

    /// Shrinks the widest column, one character at a time.
    fn shrink_columns(&self, widths: &mut [usize], shown: &[bool], columns: usize) {
        let at_shown: Vec<usize> = (0..widths.len()).filter(|at| shown[*at]).collect();
        let room = columns.saturating_sub(GAP * at_shown.len().saturating_sub(1));
        let is_kept = |at: usize| self.head.get(at).is_some_and(|name| self.kept.contains(name));
        while at_shown.iter().map(|at| widths[*at]).sum::<usize>() > room {
            let candidates = at_shown.iter().copied().filter(|at| widths[*at] > WIDTH_MIN);
            let Some(at) = candidates.max_by_key(|at| (!is_kept(*at), widths[*at])) else { return };
            widths[at] -= 1;
        }
    }
}

/// Truncates a text to `width` characters.
pub(crate) fn truncate(text: &str, width: usize) -> String {
    if text.chars().count() <= width {
        return text.to_owned();
    }
    text.chars().take(width.saturating_sub(1)).chain(['…']).collect()
}

fn render_line(row: &[Cell], widths: &[usize], shown: &[bool], style: Style) -> String {
    let mut line = String::new();
    let cells: Vec<_> = row.iter().zip(widths).zip(shown).filter(|(_, shown)| **shown).collect();
    for (at, ((cell, width), _)) in cells.iter().enumerate() {
        let text = truncate(&cell.text, **width);
        line.push_str(&style.paint(cell.colour, &text));
        if at + 1 < cells.len() {
            line.push_str(&" ".repeat(*width - text.chars().count() + GAP));
        }
    }
    line
}

#[cfg(test)]
mod tests {
    use super::{Cell, Style, Table};

    #[test]
    fn columns_are_aligned_and_the_last_is_not_padded() {
        let mut table = Table::new(["NAME", "STATUS"]);
        table.row(vec!["a-long-name".into(), Cell::status("running")]);
        table.row(vec!["b".into(), "".into()]);
        assert_eq!(
            table.lines(Style::plain()),
            ["NAME         STATUS", "a-long-name  running", "b            -"]
        );
    }

    #[test]
    fn a_table_fits_the_terminal_and_truncates_names_last() {
        let mut table = Table::new(["NAME", "STATUS", "MESSAGE", "URL"]);
        table.keep("URL");
        let message = "needs a GPU that no machine of this project has, and there is no other";
        table.row(vec![
            "a-rather-long-name".into(),
            "pending".into(),
            message.into(),
            "http://h:3000/a".into(),
        ]);
        for columns in 60..200 {
            let lines = table.lines_fitting(Style::plain(), Some(columns));
            assert!(lines.iter().all(|line| line.chars().count() <= columns), "{columns}: {lines:?}");
            assert!(
                lines[1].contains("a-rather-long-name") && lines[1].ends_with("http://h:3000/a"),
                "{lines:?}"
            );
        }
        assert!(table.lines_fitting(Style::plain(), Some(60))[1].contains("needs a GPU t…"));
        assert!(table.lines_fitting(Style::plain(), Some(40))[1].chars().count() <= 40);
        let natural = table.lines(Style::plain());
        assert_eq!(table.whole().lines_fitting(Style::plain(), Some(40)), natural);
    }

    #[test]
    fn a_cell_cannot_contain_line_breaks_or_escape_sequences() {
        let mut table = Table::new(["NAME"]);
        table.row(vec!["a\nb\u{1b}[2J".into()]);
        assert_eq!(table.lines(Style::plain())[1], "a b\\u{1b}[2J");
    }

    #[test]
    fn a_narrow_table_moves_addresses_below_and_leaves_out_optional_columns() {
        let url = "http://127.0.0.1:33253/proxy/services/main/up/";
        let mut table = Table::new(["NAME", "BACKEND", "PRICE", "STATUS", "URL", "MESSAGE"]);
        table.fold("URL");
        table.optional(["PRICE", "BACKEND"]);
        let message = "attempt 2 failed: no capacity; attempt 3 begins at 10:00";
        table.row(vec!["up".into(), "local".into(), "$0".into(), "running".into(), url.into(), "".into()]);
        table.row(vec!["waits".into(), "-".into(), "-".into(), "pending".into(), "-".into(), message.into()]);
        let whole = table.lines(Style::plain());
        assert_eq!(table.lines_fitting(Style::plain(), Some(200)), whole);
        assert_eq!(
            table.lines_fitting(Style::plain(), Some(80)),
            [
                "NAME   BACKEND  PRICE  STATUS   MESSAGE",
                "up     local    $0     running  -",
                &format!("  {url}"),
                "waits  -        -      pending  attempt 2 failed: no capacity; attempt 3 begins…",
            ]
        );
        assert_eq!(
            table.lines_fitting(Style::plain(), Some(42)),
            [
                "NAME   STATUS   MESSAGE",
                "up     running  -",
                &format!("  {url}"),
                "waits  pending  attempt 2 failed: no capa…",
            ]
        );
    }
}
