//! Tables: as wide as their widest cell, two spaces between.

use super::{
    data, printable,
    style::{Colour, Style},
};

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
        let colour = Colour::of_status(&text);
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
}

impl Table {
    pub(crate) fn new(head: impl Into<Vec<&'static str>>) -> Self {
        Self { head: head.into(), rows: Vec::new() }
    }

    pub(crate) fn row(&mut self, cells: Vec<Cell>) {
        self.rows.push(cells);
    }

    /// To stdout; a table without rows is nothing.
    pub(crate) fn print(&self) {
        if self.rows.is_empty() {
            return;
        }
        self.lines(Style::stdout()).iter().for_each(|line| data(line));
    }

    pub(crate) fn lines(&self, style: Style) -> Vec<String> {
        let head: Vec<Cell> = self.head.iter().map(|name| Cell::coloured(*name, Colour::Bold)).collect();
        let all: Vec<&Vec<Cell>> = std::iter::once(&head).chain(&self.rows).collect();
        let width = |column: usize| {
            all.iter()
                .filter_map(|row| row.get(column))
                .map(|cell| cell.text.chars().count())
                .max()
                .unwrap_or(0)
        };
        let widths: Vec<usize> = (0..self.head.len()).map(width).collect();
        all.iter().map(|row| line(row, &widths, style)).collect()
    }
}

fn line(row: &[Cell], widths: &[usize], style: Style) -> String {
    let mut line = String::new();
    for (at, (cell, width)) in row.iter().zip(widths).enumerate() {
        line.push_str(&style.paint(cell.colour, &cell.text));
        if at + 1 < row.len() {
            line.push_str(&" ".repeat(width - cell.text.chars().count() + 2));
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
    fn a_cell_cannot_break_the_line_or_drive_the_terminal() {
        let mut table = Table::new(["NAME"]);
        table.row(vec!["a\nb\u{1b}[2J".into()]);
        assert_eq!(table.lines(Style::plain())[1], "a b\\u{1b}[2J");
    }
}
