//! Details of one resource: a line for each known fact.

use super::{
    print_data, printable,
    style::{Colour, Style},
};

#[derive(Debug, Default)]
pub(crate) struct DetailView(Vec<(&'static str, String, Colour)>);

impl DetailView {
    pub(crate) fn new() -> Self {
        Self::default()
    }

    /// Adds a fact; empty values are omitted.
    pub(crate) fn add(&mut self, label: &'static str, value: impl Into<String>) {
        self.put(label, value.into(), Colour::None);
    }

    pub(crate) fn status(&mut self, label: &'static str, value: impl Into<String>) {
        let value = value.into();
        let colour = Colour::for_status(&value);
        self.put(label, value, colour);
    }

    fn put(&mut self, label: &'static str, value: String, colour: Colour) {
        if !value.is_empty() {
            self.0.push((label, printable(&value), colour));
        }
    }

    pub(crate) fn print(&self) {
        self.lines(Style::stdout()).iter().for_each(|line| print_data(line));
    }

    /// Renders the lines; multi-line values stay in their column.
    pub(crate) fn lines(&self, style: Style) -> Vec<String> {
        let width = self.0.iter().map(|(label, _, _)| label.len()).max().unwrap_or(0);
        let mut lines = Vec::new();
        for (label, value, colour) in &self.0 {
            for (at, part) in value.lines().enumerate() {
                let label = if at == 0 { label } else { "" };
                lines.push(format!("{label:width$}  {}", style.paint(*colour, part)));
            }
        }
        lines
    }
}

#[cfg(test)]
mod tests {
    use super::{DetailView, Style};

    #[test]
    fn detail_fields_are_aligned_and_empty_ones_are_omitted() {
        let mut facts = DetailView::new();
        facts.add("Name", "a\u{1b}[2J");
        facts.add("Region", "");
        facts.status("Status", "idle");
        facts.add("Why", "one\ntwo");
        assert_eq!(
            facts.lines(Style::plain()),
            ["Name    a\\u{1b}[2J", "Status  idle", "Why     one", "        two"]
        );
    }
}
